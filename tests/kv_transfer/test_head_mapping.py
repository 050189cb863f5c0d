"""Heads split over unequal numbers of ranks: every combination against plain slices of the whole."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from common.cache.page_layout import PageLayout
from kv_transfer.head_mapping import HeadRoute, heads_of, routes, slice_pairs

HEADS = (1, 2, 3, 4, 6, 8)
MODEL = PageLayout(num_layers=2, num_kv_heads=1, head_dim=1, page_size=2, dtype="float32")
CASES = [
    (num_heads, source, target)
    for num_heads in HEADS
    for source in range(1, 17)
    for target in range(1, 17)
    if not (num_heads % source and source % num_heads) and not (num_heads % target and target % num_heads)
]


def plain(num_heads: int, size: int) -> list[list[int]]:
    """Heads of each rank, dealt out by hand."""
    dealt = [head for head in range(num_heads) for _ in range(max(1, size // num_heads))]
    count = len(dealt) // size
    return [dealt[rank * count : (rank + 1) * count] for rank in range(size)]


def test_few_ranks_hold_slices_and_many_hold_copies() -> None:
    assert [list(heads_of(rank, 2, 4)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(heads_of(rank, 4, 2)) for rank in range(4)] == [[0], [0], [1], [1]]
    for num_heads, size, _ in CASES:
        assert [list(heads_of(rank, size, num_heads)) for rank in range(size)] == plain(num_heads, size)


@pytest.mark.parametrize(("num_heads", "size"), [(4, 3), (3, 2), (2, 3), (8, 12)])
def test_heads_that_cannot_be_split_evenly_are_refused(num_heads: int, size: int) -> None:
    with pytest.raises(AssertionError):
        routes(num_heads, size, 1)
    with pytest.raises(AssertionError):
        routes(num_heads, 1, size)


def test_two_ranks_of_four_heads_go_to_four_ranks_and_back() -> None:
    assert routes(4, 2, 4) == [
        HeadRoute(0, 0, 0, 0, 1), HeadRoute(0, 1, 1, 0, 1), HeadRoute(1, 2, 0, 0, 1), HeadRoute(1, 3, 1, 0, 1),
    ]  # fmt: skip
    assert routes(4, 4, 2) == [
        HeadRoute(0, 0, 0, 0, 1), HeadRoute(1, 0, 0, 1, 1), HeadRoute(2, 1, 0, 0, 1), HeadRoute(3, 1, 0, 1, 1),
    ]  # fmt: skip
    assert routes(4, 2, 1) == [HeadRoute(0, 0, 0, 0, 2), HeadRoute(1, 0, 0, 2, 2)]


def test_ranks_that_hold_the_same_head_take_turns() -> None:
    assert [(r.source, r.target) for r in routes(2, 4, 8)] == [
        (0, 0), (1, 1), (0, 2), (1, 3), (2, 4), (3, 5), (2, 6), (3, 7),
    ]  # fmt: skip
    for num_heads, source_size, target_size in CASES:
        if source_size > num_heads and target_size > num_heads:
            load = Counter(route.source for route in routes(num_heads, source_size, target_size))
            for head in range(num_heads):
                num_holders = source_size // num_heads
                loads = [load[head * num_holders + number] for number in range(num_holders)]
                assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("page_sizes", [(2, 2), (2, 4), (6, 2)])
@pytest.mark.parametrize("num_heads", HEADS)
def test_heads_shipped_by_the_routes_equal_plain_slices(num_heads: int, page_sizes: tuple[int, int]) -> None:
    """A prompt of 12 tokens; every rank of the target gets each number of its heads, and each of them once."""
    num_tokens = 12
    shape = (2, 2, num_heads, num_tokens, 1)
    kv = np.arange(1, 1 + np.prod(shape), dtype=np.int32).reshape(shape)
    for heads, source_size, target_size in CASES:
        if heads != num_heads:
            continue
        ours = replace(MODEL, page_size=page_sizes[0], num_kv_heads=max(1, num_heads // source_size))
        theirs = replace(MODEL, page_size=page_sizes[1], num_kv_heads=max(1, num_heads // target_size))
        sources = [_pages(kv[:, :, held], ours.page_size) for held in plain(num_heads, source_size)]
        targets = [np.zeros((num_tokens // theirs.page_size, *theirs.shape), np.int32) for _ in range(target_size)]
        for route in routes(num_heads, source_size, target_size):
            moved = slice_pairs(route, ours, theirs)
            size = min(page_sizes)
            for unit in range(num_tokens // size):
                source = sources[route.source][unit * size // ours.page_size].view(np.uint8).reshape(-1)
                target = targets[route.target][unit * size // theirs.page_size].view(np.uint8).reshape(-1)
                for at, to, length in moved[unit % len(moved)].runs:
                    assert not target[to : to + length].any(), "a number was shipped twice"
                    target[to : to + length] = source[at : at + length]
        for rank, held in enumerate(plain(num_heads, target_size)):
            assert (targets[rank] == _pages(kv[:, :, held], theirs.page_size)).all()


def _pages(kv: np.ndarray, page_size: int) -> np.ndarray:
    """[layer][side][head][token][dim] cut into pages."""
    return np.stack(np.split(kv, kv.shape[3] // page_size, axis=3))
