"""Whoever asks a node gets the answer to that question, or none."""

import asyncio

from common.wire.messages import Decisions, Flush, Flushed, GetDecisions, Message
from gateway.workers.rpc import Questions

NODES = ("a" * 32, "b" * 32)


def asked() -> tuple[Questions, list[tuple[str, Message]]]:
    """And what was sent; everybody but "c" can be reached."""
    sent: list[tuple[str, Message]] = []

    def send(message: Message, incarnation: str) -> bool:
        sent.append((incarnation, message))
        return not incarnation.startswith("c")

    return Questions(send), sent


async def soon(questions: Questions, timeout_s: float = 5.0) -> "asyncio.Task[dict[str, Flushed]]":
    task = asyncio.create_task(questions.ask([*NODES, "c" * 32], Flush(), Flushed, timeout_s))
    await asyncio.sleep(0)
    return task


async def test_answers_are_by_node_and_who_is_gone_or_out_of_reach_has_none() -> None:
    questions, sent = asked()
    task = await soon(questions)
    assert [message.number for _, message in sent if isinstance(message, Flush)] == [1, 1, 1]
    questions.answered(NODES[0], Flushed(7, 1))
    questions.gone(NODES[1])
    assert await task == {NODES[0]: Flushed(7, 1)}
    assert not questions._open


async def test_a_late_answer_is_nobody_elses() -> None:
    questions, _ = asked()
    assert await (await soon(questions, 0.01)) == {}
    task = await soon(questions)
    for node in NODES:
        questions.answered(node, Flushed(1, 1))
    assert not task.done()
    for node in NODES:
        questions.answered(node, Flushed(2, 2))
    assert await task == {node: Flushed(2, 2) for node in NODES}


async def test_who_leaves_before_the_answer_leaves_nothing_behind() -> None:
    questions, _ = asked()
    task = await soon(questions)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not questions._open
    questions.answered(NODES[0], Flushed(1, 1))


async def test_an_answer_of_another_kind_is_none() -> None:
    questions, _ = asked()
    task = asyncio.create_task(questions.ask([NODES[0]], GetDecisions(5), Flushed, 5.0))
    await asyncio.sleep(0)
    questions.answered(NODES[0], Decisions((), 1))
    assert await task == {}
