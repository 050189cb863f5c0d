"""Calls to nodes that return an answer, matched by a call number."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TypeVar

import msgspec

from common.wire.messages import (
    Adapters,
    ChangeRole,
    Decisions,
    Done,
    Drain,
    Find,
    Flush,
    Flushed,
    Found,
    GetDecisions,
    LoadAdapter,
    Message,
    ProfileAnswer,
    StartProfile,
    StopProfile,
    UnloadAdapter,
)

Question = Find | Flush | GetDecisions | StartProfile | StopProfile | LoadAdapter | UnloadAdapter | ChangeRole | Drain
Answer = TypeVar("Answer", Found, Flushed, Decisions, ProfileAnswer, Adapters, Done)


class NodeRpc:
    """The calls that wait for an answer.

    Args:
        send: sends to one node. ``on_node_gone`` follows if it cannot be reached.
    """

    def __init__(self, send: Callable[[Message, str], None]) -> None:
        self._send = send
        self._num_calls = 0
        self._open: dict[tuple[str, int], asyncio.Future[Message | None]] = {}

    def call(
        self, incarnations: Iterable[str], request: Question, kind: type[Answer], timeout_s: float
    ) -> Coroutine[None, None, dict[str, Answer]]:
        """Send a call to nodes, at once, and return what waits for the answers.

        Nodes that are gone or do not answer in time are left out.
        """
        self._num_calls += 1
        number, loop = self._num_calls, asyncio.get_running_loop()
        message = msgspec.structs.replace(request, number=number)
        waits: dict[str, asyncio.Future[Message | None]] = {}
        for incarnation in incarnations:
            self._send(message, incarnation)
            waits[incarnation] = self._open[incarnation, number] = loop.create_future()
        return self._answers(waits, number, kind, timeout_s)

    async def _answers(
        self, waits: Mapping[str, "asyncio.Future[Message | None]"], number: int, kind: type[Answer], timeout_s: float
    ) -> dict[str, Answer]:
        try:
            if waits:
                await asyncio.wait(waits.values(), timeout=timeout_s)
        finally:
            for incarnation in waits:
                self._open.pop((incarnation, number), None)
        answers = {incarnation: wait.result() for incarnation, wait in waits.items() if wait.done()}
        return {incarnation: answer for incarnation, answer in answers.items() if isinstance(answer, kind)}

    def on_answer(
        self, incarnation: str, answer: Found | Flushed | Decisions | ProfileAnswer | Adapters | Done
    ) -> None:
        """Pass on an answer; one that is too late is dropped."""
        self._end(incarnation, answer.number, answer)

    def on_node_gone(self, incarnation: str) -> None:
        """End the calls to a node that is gone."""
        for _, number in [key for key in self._open if key[0] == incarnation]:
            self._end(incarnation, number, None)

    def _end(self, incarnation: str, number: int, answer: Message | None) -> None:
        wait = self._open.pop((incarnation, number), None)
        if wait is not None and not wait.done():
            wait.set_result(answer)
