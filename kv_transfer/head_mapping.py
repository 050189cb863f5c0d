"""Which KV heads go from which rank of one node to which rank of another that splits them differently. Pure arithmetic.

A node of ``size`` tensor-parallel ranks splits the model's KV heads into equal slices, in order; with more ranks than
heads, each head is held by several consecutive ranks, all alike. Every rank of the receiving node gets each of its
heads from exactly one rank; where several have it, the receivers are spread over them.

A ``HeadRoute`` with the units of ``page_mapping`` gives the slice pairs that travel over it, so that page sizes and
splits may differ at once. A rank counts the delivery of its pages by the routes that end at it, numbered in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.cache.page_layout import PageLayout
from kv_transfer.page_mapping import parts_of, units_of
from kv_transfer.page_slices import SlicePair


@dataclass(frozen=True, slots=True)
class HeadRoute:
    """Consecutive heads that go from one rank to another.

    Attributes:
        source, target: ranks.
        source_head, target_head: the first of the heads, as each rank counts its own.
        num_heads: how many.
    """

    source: int
    target: int
    source_head: int
    target_head: int
    num_heads: int


def heads_of(rank: int, size: int, num_heads: int) -> range:
    """Heads of the model that this rank of ``size`` holds."""
    assert 0 <= rank < size
    if size <= num_heads:
        assert num_heads % size == 0, f"{num_heads} heads cannot be split evenly over {size} ranks"
        count = num_heads // size
        return range(rank * count, (rank + 1) * count)
    assert size % num_heads == 0, f"{size} ranks cannot hold {num_heads} heads evenly"
    head = rank // (size // num_heads)
    return range(head, head + 1)


def routes(num_heads: int, source_size: int, target_size: int) -> list[HeadRoute]:
    """All routes from a node of ``source_size`` ranks to one of ``target_size``, by target and then by head.

    Each size must divide the number of the model's KV heads, or be a multiple of it.
    """
    found: list[HeadRoute] = []
    for target in range(target_size):
        wanted = heads_of(target, target_size, num_heads)
        for head in wanted:
            source = _holder(head, target, (num_heads, source_size, target_size))
            source_head = head - heads_of(source, source_size, num_heads).start
            last = found[-1] if found else None
            if last is not None and (last.source, last.target) == (source, target):
                found[-1] = replace(last, num_heads=last.num_heads + 1)
            else:
                found.append(HeadRoute(source, target, source_head, head - wanted.start, 1))
    return found


def _holder(head: int, target: int, sizes: tuple[int, int, int]) -> int:
    """The rank that sends a head to this target; ranks that hold the same head take turns."""
    num_heads, source_size, target_size = sizes
    if source_size <= num_heads:
        return head // (num_heads // source_size)
    num_holders = source_size // num_heads
    num_askers = max(1, target_size // num_heads)
    turn = target % num_askers if num_askers > 1 else target
    return head * num_holders + turn % num_holders


def slice_pairs(route: HeadRoute, ours: PageLayout, theirs: PageLayout) -> Sequence[SlicePair]:
    """The slice pairs that travel over a route, by a unit's number modulo their count.

    Args:
        ours, theirs: pages of the source rank and of the target rank, each with that rank's heads alone.
    """
    units = units_of(ours.page_size, theirs.page_size)
    return [
        SlicePair(
            ours,
            source._replace(head=route.source_head, num_heads=route.num_heads),
            theirs,
            target._replace(head=route.target_head, num_heads=route.num_heads),
        )
        for source in parts_of(ours, units.per_source)
        for target in parts_of(theirs, units.per_target)
    ]
