"""Caches that nodes are asked to forget, and their answers."""

import asyncio
from collections.abc import Callable, Iterable


class Flushes:
    """Who has been asked and has not answered. Several who ask at once share the nodes' answers.

    Args:
        send: asks one node; False if it cannot be reached.
    """

    def __init__(self, send: Callable[[str], bool]) -> None:
        self._send = send
        self._waits: dict[str, asyncio.Future[int | None]] = {}

    async def ask(self, incarnations: Iterable[str], timeout_s: float) -> dict[str, int]:
        """Asks these nodes and waits. Pages that each has forgotten; those that gave no answer in time are left out."""
        loop = asyncio.get_running_loop()
        waits: dict[str, asyncio.Future[int | None]] = {}
        for incarnation in incarnations:
            waits[incarnation] = self._waits.setdefault(incarnation, loop.create_future())
            if not self._send(incarnation):
                self.answered(incarnation, None)
        if waits:
            await asyncio.wait(waits.values(), timeout=timeout_s)
        answers = {incarnation: wait.result() for incarnation, wait in waits.items() if wait.done()}
        return {incarnation: num_pages for incarnation, num_pages in answers.items() if num_pages is not None}

    def answered(self, incarnation: str, num_pages: int | None) -> None:
        """A node has answered, or (None) has gone."""
        wait = self._waits.pop(incarnation, None)
        if wait is not None and not wait.done():
            wait.set_result(num_pages)
