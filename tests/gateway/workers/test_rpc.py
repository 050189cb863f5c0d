"""Calls to nodes and their answers."""

import asyncio

from common.wire.messages import Decisions, Flush, Flushed, GetDecisions, Message
from gateway.workers.rpc import NodeRpc

NODES = ("a" * 32, "b" * 32)


def asked() -> tuple[NodeRpc, list[tuple[str, Message]]]:
    """The calls and the messages that they sent."""
    sent: list[tuple[str, Message]] = []

    def send(message: Message, incarnation: str) -> None:
        sent.append((incarnation, message))

    return NodeRpc(send), sent


async def soon(rpc: NodeRpc, timeout_s: float = 5.0) -> "asyncio.Task[dict[str, Flushed]]":
    task = asyncio.create_task(rpc.call(NODES, Flush(), Flushed, timeout_s))
    await asyncio.sleep(0)
    return task


async def test_removed_nodes_have_no_answer() -> None:
    rpc, sent = asked()
    task = await soon(rpc)
    assert [message.number for _, message in sent if isinstance(message, Flush)] == [1, 1]
    rpc.on_answer(NODES[0], Flushed(7, 1))
    rpc.on_node_gone(NODES[1])
    assert await task == {NODES[0]: Flushed(7, 1)}
    assert not rpc._open


async def test_a_late_answer_is_dropped() -> None:
    rpc, _ = asked()
    assert await (await soon(rpc, 0.01)) == {}
    task = await soon(rpc)
    for node in NODES:
        rpc.on_answer(node, Flushed(1, 1))
    assert not task.done()
    for node in NODES:
        rpc.on_answer(node, Flushed(2, 2))
    assert await task == {node: Flushed(2, 2) for node in NODES}


async def test_a_cancelled_call_leaves_no_state() -> None:
    rpc, _ = asked()
    task = await soon(rpc)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not rpc._open
    rpc.on_answer(NODES[0], Flushed(1, 1))


async def test_an_answer_of_another_type_is_ignored() -> None:
    rpc, _ = asked()
    task = asyncio.create_task(rpc.call([NODES[0]], GetDecisions(5), Flushed, 5.0))
    await asyncio.sleep(0)
    rpc.on_answer(NODES[0], Decisions((), 1))
    assert await task == {}


async def test_nodes_are_asked_before_they_are_sent_anything_later() -> None:
    """A request may be sent to nodes while its retry begins to wait; they must not be asked for its outputs then."""
    rpc, sent = asked()
    answers = asyncio.gather(rpc.call(NODES, Flush(), Flushed, 5.0))
    assert [node for node, _ in sent] == list(NODES)
    for node in NODES:
        rpc.on_answer(node, Flushed(1, 1))
    assert await answers == [{node: Flushed(1, 1) for node in NODES}]
