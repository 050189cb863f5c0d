"""Clients that keep a service busy, and find what it loses."""

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Self

API_KEY = "k"
WAIT_S = 300.0


class NotTaken(Exception):
    """A gateway has not taken a request."""


class Load:
    """Clients that send one request after the other, to the first gateway that takes it.

    A connection that is refused, or reset by the kernel before the gateway has accepted it, goes to another gateway.

    Args:
        may_lose_gateways: a request whose answer breaks off is sent again with its key; otherwise it has failed.

    Attributes:
        pause_s: between two requests of a client. Without one, the load would take the processors from all that starts.
        num_ended: requests that were answered in full.
        failures: what went wrong with others.
    """

    def __init__(
        self, addresses: list[str], port: int, *, num_clients: int = 3, may_lose_gateways: bool = False
    ) -> None:
        self.addresses = addresses
        self._port = port
        self._may_lose_gateways = may_lose_gateways
        self.pause_s = 0.3
        self.num_ended = 0
        self.failures: list[str] = []
        self._texts: dict[int, str] = {}
        self._is_over = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_clients)]

    def __enter__(self) -> Self:
        for number in range(len(self._threads)):
            self._texts[number] = self.ask(number, "first")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def until_more(self, count: int = 5) -> None:
        """Return once so many more requests have ended."""
        goal = self.num_ended + count
        until(lambda: self.num_ended >= goal or bool(self.failures), f"{count} more requests", lambda: "")
        assert not self.failures, self.failures

    def ask(self, number: int, key: str) -> str:
        """The text of an answer, from the first gateway that gives it."""
        ends = time.monotonic() + WAIT_S
        while True:
            for address in self.addresses:
                try:
                    return self._ask(address, number, key)
                except NotTaken:
                    continue
                except (OSError, http.client.HTTPException):
                    if not self._may_lose_gateways:
                        raise
            if time.monotonic() > ends:
                raise TimeoutError(f"no gateway of {self.addresses} answers")
            time.sleep(0.2)

    def _ask(self, address: str, number: int, key: str) -> str:
        connection = http.client.HTTPConnection(address, self._port, timeout=60)
        body = {"model": "m", "prompt": f"Act {number}. " * 20, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        headers = {
            "Authorization": f"Bearer {API_KEY}",
            "Content-Type": "application/json",
            "Idempotency-Key": f"{number}-{key}",
        }
        try:
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                answer = connection.getresponse()
            except http.client.RemoteDisconnected:
                raise  # the gateway had accepted it, and closed it
            except (ConnectionRefusedError, ConnectionResetError) as error:
                raise NotTaken from error
            content = answer.read()
        finally:
            connection.close()
        if answer.status == 503 and b'"no_route"' in content:
            raise NotTaken  # this gateway has no nodes yet; a balancer would know that from its /ready
        if answer.status != 200:
            raise AssertionError(f"{answer.status} {content.decode(errors='replace')}")
        return str(json.loads(content)["choices"][0]["text"])

    def _run(self, number: int) -> None:
        count = 0
        while not self._is_over:
            count += 1
            try:
                text = self.ask(number, str(count))
            except Exception as error:
                self.failures.append(repr(error))
                return
            if text != self._texts[number]:
                self.failures.append(f"{text!r} is not {self._texts[number]!r}")
            with self._lock:
                self.num_ended += 1
            time.sleep(self.pause_s)


def until(condition: Callable[[], object], what: str, explain: Callable[[], str]) -> None:
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends, f"waited for {what}\n{explain()}"
        time.sleep(0.5)
