"""Clients that heed Retry-After, and a server of known rate, in virtual time."""

import heapq
import random
from types import SimpleNamespace

from common.errors import RequestError


class Server:
    """Runs ``rows`` requests at once and lets ``max_queued`` more wait; ``admission`` decides.

    Args:
        service_s: mean time in a row. Every request takes between half of it and one and a half times as long.

    Attributes:
        times_refused: by client.
        waits: every Retry-After that was given.
        ended_at: when the last request ended.
    """

    def __init__(self, admission, *, rows, service_s, seed=0):
        self.admission = admission
        self.rows = rows
        self.service_s = service_s
        self.now = 0.0
        self.times_refused = {}
        self.waits = []
        self.ended_at = 0.0
        self._random = random.Random(seed)
        self._events = []
        self._num_events = 0
        self._queue = []
        self._running = {}

    @property
    def rate(self):
        return self.rows / self.service_s

    def burst(self, at, clients, *, returning=1.0, spread_s=0.0):
        """All of these clients come within ``spread_s``; a share of those that are refused comes back."""
        for client in clients:
            self.times_refused[client] = 0
            self._at(at + self._random.uniform(0.0, spread_s), self._arrive, client, self._random.random() < returning)

    def run(self):
        while self._events:
            self.now, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
        assert self.admission.num_in_flight == 0

    def _at(self, at, act, *arguments):
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, act, arguments))

    def _arrive(self, client, is_returning):
        try:
            self.admission.admit(
                1,
                max_running=self.rows,
                now=self.now,
                waiting=self._queue,
                in_flight=map(self._stream, self._running.values()),
            )
        except RequestError as error:
            self.times_refused[client] += 1
            self.waits.append(error.retry_after_s)
            if is_returning:
                self._at(self.now + error.retry_after_s, self._arrive, client, True)
            return
        self._queue.append(client)
        self._fill()

    def _fill(self):
        while self._queue and len(self._running) < self.rows:
            client = self._queue.pop(0)
            service_s = self.service_s * self._random.uniform(0.5, 1.5)
            self._running[client] = (self.now, service_s)
            self._at(self.now + service_s, self._end, client)

    def _end(self, client):
        _, service_s = self._running.pop(client)
        self.ended_at = self.now
        self.admission.release(self.now, served_s=service_s)
        self._fill()

    def _stream(self, running):
        """The output of a running request, which makes 20 tokens at an even pace."""
        sent_at, service_s = running
        pace_s = service_s / 20
        num_made = int((self.now - sent_at) / pace_s + 1e-9)
        return SimpleNamespace(
            ids=[0] * num_made,
            request=SimpleNamespace(expected_output=20, sampling=SimpleNamespace(max_new_tokens=20)),
            sent_at=sent_at,
            first_at=sent_at + pace_s,
            last_at=sent_at + num_made * pace_s,
        )
