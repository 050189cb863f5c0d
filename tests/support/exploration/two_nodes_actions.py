"""The possible actions in a world of two nodes: their steps, arrivals of messages and pages, faults, and time."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from support.exploration.state_explorer import Action
from support.exploration.two_nodes_parts import PAGE_FAULTS

from common.request import RequestKey

if TYPE_CHECKING:
    from support.exploration.two_nodes import TwoNodes


def actions_of(world: "TwoNodes") -> Iterator[Action]:
    """Return all possible actions; none when no node holds anything."""
    free = [*_of_prefill(world), *_of_decode(world), *_of_links(world)]
    yield from free
    if world.num_faults < world.scope.num_faults:
        yield from (action for action in _faults(world) if action[0] in world.scope.faults)
    if not free:
        yield from _of_time(world)


def _of_prefill(world: "TwoNodes") -> Iterator[Action]:
    node = world.prefill
    for key in world.keys:
        if world.routes.get(key, (node.name, ""))[0] != node.name:
            continue
        if key not in node.pages and key not in node.released:
            if world.sizes[key] <= node.allocator.num_free:
                yield ("open", key)
        elif key in node.pages and key not in node.finished:
            yield ("compute", key)
    if (
        node.sender._queue.has_due
        or node.writer.finished
        or node.writer._news
        or getattr(node.transport, "_draining", None)
    ):
        yield ("pump",)
    yield from (("arrive", number) for number in world.wire.in_flight)


def _of_decode(world: "TwoNodes") -> Iterator[Action]:
    node = world.decode
    for key in world.keys:
        if world.routes.get(key, ("", node.name))[1] != node.name or key in node.ended:
            continue
        num_lacking = world.sizes[key] - world.scope.first
        if key not in node.begun and num_lacking <= node.allocator.num_free:
            yield ("begin", key, num_lacking)
    if node.reader._news or getattr(node.transport, "_news", None):
        yield ("poll",)
    if any(link.retry_at is not None for link in node.receiver._connections.by_peer.values()):
        yield ("retry",)


def _of_links(world: "TwoNodes") -> Iterator[Action]:
    for number, link in enumerate(world.links):
        if link.to_prefill:
            yield ("prefill hears", number, 0)
        if link.to_decode:
            yield ("decode hears", number, 0)
        if link.is_torn and link.is_open_at_prefill:
            yield ("prefill notices", number)
        if link.is_torn and link.is_open_at_decode:
            yield ("decode notices", number)


def _faults(world: "TwoNodes") -> Iterator[Action]:
    for number, link in enumerate(world.links):
        for queue, messages in (("to_prefill", link.to_prefill), ("to_decode", link.to_decode)):
            yield from (("overtake", number, queue, at) for at in range(1, len(messages)))
            yield from (("lose", number, queue, at) for at in range(len(messages)))
            if messages:
                yield ("repeat", number, queue)
        if not link.is_torn:
            yield ("tear", number)
    for page in world.wire.in_flight:
        yield from ((kind, page) for kind in PAGE_FAULTS)
    if not world.prefill.writer.is_refused:
        yield ("refuse",)
    yield ("kill prefill",)
    yield ("kill decode",)
    for key in world.prefill.pages:
        yield ("abort", key)
        if key not in world.prefill.finished:
            yield ("finish early", key)
        if not world.prefill.sender.is_granted(key):
            yield ("retract", key)
    yield from (("cancel", key) for key in _expected(world))
    if world.prefill.sender._table.early:
        yield ("lease",)
    if len(world.prefill.sender._table.tombstones) and not any(link.to_prefill for link in world.links):
        yield ("tombstones",)  # a tombstone outlives every message in flight


def _expected(world: "TwoNodes") -> list[RequestKey]:
    return [key for key in world.decode.begun if key not in world.decode.ended]


def _of_time(world: "TwoNodes") -> Iterator[Action]:
    """When nothing else can happen, deadlines expire, then leases."""
    late = [("deadline at prefill", key) for key in world.prefill.pages]
    late += [("deadline at decode", key) for key in _expected(world)]
    yield from late
    if not late and world.prefill.sender._table.early:
        yield ("last lease",)
