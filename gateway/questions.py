"""What nodes are asked, and their answers. A node answers questions of one kind in the order in which it was asked."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from common.messages import Message

Answer = TypeVar("Answer", bound=Message)


class Questions:
    """Who has been asked and has not answered.

    Args:
        send: to one node; False if it cannot be reached.
    """

    def __init__(self, send: Callable[[Message, str], bool]) -> None:
        self._send = send
        self._open: dict[tuple[str, type[Message]], deque[asyncio.Future[Message | None]]] = {}

    async def ask(
        self, incarnations: Iterable[str], question: Message, kind: type[Answer], timeout_s: float
    ) -> dict[str, Answer]:
        """Asks these nodes and waits. Those that have gone, or gave no answer in time, are left out.

        Args:
            kind: of the answers.
        """
        loop = asyncio.get_running_loop()
        waits: dict[str, asyncio.Future[Message | None]] = {}
        for incarnation in incarnations:
            if self._send(question, incarnation):
                waits[incarnation] = loop.create_future()
                self._open.setdefault((incarnation, kind), deque()).append(waits[incarnation])
        if waits:
            await asyncio.wait(waits.values(), timeout=timeout_s)
        for incarnation, wait in waits.items():
            if not wait.done():  # should it answer yet, the next who asks gets that
                self._open[incarnation, kind].remove(wait)
        answers = {incarnation: wait.result() for incarnation, wait in waits.items() if wait.done()}
        return {incarnation: answer for incarnation, answer in answers.items() if isinstance(answer, kind)}

    def answered(self, incarnation: str, answer: Message) -> None:
        """A node has answered."""
        waits = self._open.get((incarnation, type(answer)))
        if waits:
            wait = waits.popleft()
            if not wait.done():
                wait.set_result(answer)

    def gone(self, incarnation: str) -> None:
        """A node will give no more answers."""
        for key in [key for key in self._open if key[0] == incarnation]:
            for wait in self._open.pop(key):
                if not wait.done():
                    wait.set_result(None)
