"""What nodes are asked, and their answers, which carry the number of the question."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from common.wire.messages import Decisions, Flush, Flushed, GetDecisions, Message

Answer = TypeVar("Answer", Flushed, Decisions)


class Questions:
    """Who has been asked and has not answered.

    Args:
        send: to one node; False if it cannot be reached.
    """

    def __init__(self, send: Callable[[Message, str], bool]) -> None:
        self._send = send
        self._num_asked = 0
        self._open: dict[tuple[str, int], asyncio.Future[Message | None]] = {}

    async def ask(
        self, incarnations: Iterable[str], question: Flush | GetDecisions, kind: type[Answer], timeout_s: float
    ) -> dict[str, Answer]:
        """Asks these nodes and waits. Those that have gone, or gave no answer in time, are left out.

        Args:
            kind: of the answers.
        """
        self._num_asked += 1
        number, loop = self._num_asked, asyncio.get_running_loop()
        asked = msgspec.structs.replace(question, number=number)
        waits: dict[str, asyncio.Future[Message | None]] = {}
        for incarnation in incarnations:
            if self._send(asked, incarnation):
                waits[incarnation] = self._open[incarnation, number] = loop.create_future()
        try:
            if waits:
                await asyncio.wait(waits.values(), timeout=timeout_s)
        finally:
            for incarnation in waits:
                self._open.pop((incarnation, number), None)
        answers = {incarnation: wait.result() for incarnation, wait in waits.items() if wait.done()}
        return {incarnation: answer for incarnation, answer in answers.items() if isinstance(answer, kind)}

    def answered(self, incarnation: str, answer: Flushed | Decisions) -> None:
        """A node has answered; perhaps too late for whoever asked."""
        self._end(incarnation, answer.number, answer)

    def gone(self, incarnation: str) -> None:
        """A node will give no more answers."""
        for _, number in [asked for asked in self._open if asked[0] == incarnation]:
            self._end(incarnation, number, None)

    def _end(self, incarnation: str, number: int, answer: Message | None) -> None:
        wait = self._open.pop((incarnation, number), None)
        if wait is not None and not wait.done():
            wait.set_result(answer)
