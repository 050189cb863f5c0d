"""Sends the requests of a run, a number of them at any time, and judges every answer.

With several gateways, each request has a key. When the gateway that answers is killed, the request is sent to the next
one, which goes on where the nodes are; the client then compares the whole answer, from its first token.
"""

import asyncio
import contextlib
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from scripts.chaos_harness.answers import Answer, Verdict, as_seen, judge
from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.service import ChaosService, Node
from scripts.chaos_harness.verdicts import Tally
from scripts.chaos_harness.workload import LoadRequest, keyed

#: Beyond --request-timeout, until a request without an end counts as hanging.
HANGING_GRACE_S = 15.0
REFUSED_S = 1.0  # until a refused request is sent again
TOLD_EVERY = 1_000  # requests
LOST_S = 0.1  # until a request is sent again whose connection was lost


class Load:
    """Sends the requests of a run, and judges the answers.

    Args:
        reference: the answer to each distinct request, by its number.
        tell: called with what goes wrong, for the timeline.
    """

    def __init__(
        self, config: ChaosConfig, service: ChaosService, reference: Mapping[int, Answer], tally: Tally,
        *, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._config = config
        self._service = service
        self._reference = reference
        self._tally = tally
        self._tell = tell
        self._turn = 0

    async def run(self, drawn: Iterator[LoadRequest]) -> None:
        """Send --requests of these; return when all have ended."""
        numbers = iter(range(self._config.requests))
        duration = self._config.duration
        ends_at = float("inf") if duration is None else time.monotonic() + duration

        async def work() -> None:
            while time.monotonic() < ends_at and next(numbers, None) is not None:
                await self._one(next(drawn))

        async with self._progress(), asyncio.TaskGroup() as group:
            for _ in range(self._config.concurrency):
                group.create_task(work())

    async def _one(self, request: LoadRequest) -> None:
        """Send a request until it is accepted and has been answered by a gateway that lives, and judge the answer."""
        headers, has_key = "", len(self._service.gateways) > 1
        if has_key:
            request, headers = keyed(request, uuid.uuid4().hex)
        timeout_s = self._config.request_timeout + HANGING_GRACE_S
        reference = self._reference[request.number]
        earlier: list[Answer] = []
        gives_up_at = time.monotonic() + timeout_s
        while True:
            gateway = self._next_gateway()
            answer = await self._service.clients[gateway.name].send(request, timeout_s, headers)
            may_resend = has_key and time.monotonic() < gives_up_at and _is_cut_off(answer, gateway)
            if may_resend and self._judge(answer, reference) is Verdict.LOST:
                self._tally.num_resent += gateway.killed_at >= answer.began_at
                earlier.append(answer)
                await asyncio.sleep(LOST_S)
                continue
            if answer.is_complete:
                answer = as_seen(earlier, answer)
            verdict = self._tally.add(request, answer, reference)
            if verdict not in (Verdict.EQUAL, Verdict.ROUNDED):
                self._tell(f"request {request.number} ({request.kind}): {verdict.value} {answer.code}")
            if verdict is not Verdict.REFUSED:
                if self._tally.num_sent % TOLD_EVERY == 0:
                    self._tell(f"{self._tally.num_sent:,} requests have been answered")
                return
            await asyncio.sleep(REFUSED_S)

    def _judge(self, answer: Answer, reference: Answer) -> Verdict:
        return judge(answer, reference, is_exact=self._tally.is_exact)[0]

    def _next_gateway(self) -> Node:
        """The next gateway in turn that serves; the next one if none does."""
        self._turn += 1
        gateways = self._service.gateways
        ordered = [gateways[(self._turn + i) % len(gateways)] for i in range(len(gateways))]
        return next((gateway for gateway in ordered if gateway.is_registered), ordered[0])

    @contextlib.asynccontextmanager
    async def _progress(self) -> AsyncIterator[None]:
        """Show on the terminal how many requests have been answered."""
        if not (self._config.progress and sys.stderr.isatty()):
            yield
            return
        shown = asyncio.create_task(self._show_progress())
        try:
            yield
        finally:
            shown.cancel()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            line = f"{self._tally.num_sent:,} of {self._config.requests:,} requests"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _is_cut_off(answer: Answer, gateway: Node) -> bool:
    """Whether an answer has no end because its gateway was killed, or does not yet serve again."""
    return gateway.killed_at >= answer.began_at or (not gateway.is_registered and not answer.status)
