"""Slices of pages: where their bytes lie, and that copying them equals a plain gather and scatter."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kv.kv_fakes import shape_of

from common.cache.page_layout import PageLayout, kv_heads_of
from kv_transfer.page_mapping import HeadPart, PageMapping, head_parts, target_units, units_of
from kv_transfer.page_slices import PageSlice, SlicePair, copy, whole, whole_pages
from kv_transfer.transports.tcp.receive_thread import Destination

LAYOUT = PageLayout(num_layers=2, num_kv_heads=3, head_dim=2, page_size=4, dtype="float32")  # 8 bytes per token
SIZES = (1, 2, 3, 4, 6, 8, 12)
PAIRS = [(s, t) for s in SIZES for t in SIZES if s % t == 0 or t % s == 0]


def numbered(layout: PageLayout, num_pages: int) -> np.ndarray:
    """Pages filled with consecutive numbers from 1 on."""
    count = num_pages * layout.page_bytes // 4
    return np.arange(1, 1 + count, dtype=np.int32).reshape(num_pages, *shape_of(layout))


def test_a_whole_page_is_one_run() -> None:
    assert whole(LAYOUT).runs(LAYOUT) == [(0, LAYOUT.page_bytes)]
    assert whole(LAYOUT).num_bytes(LAYOUT) == LAYOUT.page_bytes == 2 * 2 * 3 * 4 * 8


def test_a_slice_is_one_run_for_each_layer_side_and_head() -> None:
    page_slice = PageSlice(2, 2, 0, 3)
    assert page_slice.runs(LAYOUT) == [(16 + 32 * plane, 16) for plane in range(12)]
    assert page_slice.num_bytes(LAYOUT) == 192


@pytest.mark.parametrize(
    "page_slice",
    [
        PageSlice(2, 3, 0, 3),
        PageSlice(4, 1, 0, 3),
        PageSlice(0, 0, 0, 3),
        PageSlice(-1, 1, 0, 3),
        PageSlice(0, 4, 2, 2),
        PageSlice(0, 4, 1, 0),
    ],
)
def test_a_slice_that_is_empty_or_exceeds_the_page_is_not_within_it(page_slice: PageSlice) -> None:
    assert not page_slice.is_within(LAYOUT)


slices = st.builds(PageSlice, st.integers(0, 4), st.integers(1, 4), st.integers(0, 2), st.integers(1, 2))


@given(one=slices, other=slices)
def test_two_slices_overlap_if_they_share_a_token_of_a_head(one: PageSlice, other: PageSlice) -> None:
    def bytes_of(page_slice: PageSlice) -> set[tuple[int, int]]:
        tokens = range(page_slice.token, page_slice.token + page_slice.num_tokens)
        return set(product(tokens, range(page_slice.head, page_slice.head + page_slice.num_heads)))

    assert one.overlaps(other) == other.overlaps(one) == bool(bytes_of(one) & bytes_of(other))


@pytest.mark.parametrize(("source_size", "target_size"), PAIRS)
def test_prompts_sent_in_units_arrive_as_with_a_plain_gather(source_size: int, target_size: int) -> None:
    """Covers every length of prompt up to two large pages, sent one unit at a time."""
    ours, theirs = replace(LAYOUT, page_size=source_size), replace(LAYOUT, page_size=target_size)
    mapping = PageMapping(ours, theirs)
    for num_tokens in range(1, 2 * max(source_size, target_size) + 1):
        source, target = (
            numbered(ours, ours.num_pages(num_tokens)),
            np.zeros_like(numbered(theirs, theirs.num_pages(num_tokens))),
        )
        told: list[tuple[int, int]] = []
        for unit in range(mapping.units.count(num_tokens)):
            slices = mapping.slice_pairs[unit % len(mapping.slice_pairs)]
            index, unit_of_page = divmod(unit, mapping.units.per_target)
            from_page, to_page = (
                memoryview(source[unit // mapping.units.per_source]).cast("B"),
                memoryview(target[index]).cast("B"),
            )
            if slices is None:
                to_page[:] = from_page
            else:
                copy(slices, from_page, to_page)
            told.append((index, unit_of_page))
        assert len(set(told)) == len(told)
        # [page][layer][side][head][token] -> [layer][side][head][token of the prompt]
        flat_source = np.concatenate(list(source), axis=3)[..., :num_tokens, :]
        flat_target = np.concatenate(list(target), axis=3)[..., :num_tokens, :]
        assert (flat_source == flat_target).all()


RANKS = [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2), (3, 1), (1, 3), (4, 8), (8, 4), (8, 1), (1, 8)]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 6, 12])
@pytest.mark.parametrize(("num_sources", "num_targets"), RANKS)
def test_every_target_rank_gets_each_of_its_heads_once_from_a_rank_that_has_it(
    num_kv_heads: int, num_sources: int, num_targets: int
) -> None:
    for num_ranks in (num_sources, num_targets):
        if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
            return  # such a model is refused at the start of the node
    parts = head_parts(num_kv_heads, num_sources, num_targets)
    assert len({part[:2] for part in parts}) == len(parts)
    for rank in range(num_targets):
        got = [head for part in parts if part.target_rank == rank for head in part.heads]
        assert got == list(kv_heads_of(rank, num_targets, num_kv_heads))
    for part in parts:
        assert set(part.heads) <= set(kv_heads_of(part.source_rank, num_sources, num_kv_heads))
    if num_targets >= num_sources:
        assert {part.source_rank for part in parts} == set(range(num_sources))


def test_the_parts_of_a_page_worked_out_by_hand() -> None:
    assert head_parts(4, 1, 2) == (HeadPart(0, 0, range(2)), HeadPart(0, 1, range(2, 4)))
    assert head_parts(4, 2, 1) == (HeadPart(0, 0, range(2)), HeadPart(1, 0, range(2, 4)))
    assert head_parts(2, 2, 4) == tuple(
        HeadPart(target // 2, target, range(target // 2, target // 2 + 1)) for target in range(4)
    )
    assert head_parts(1, 4, 2) == (HeadPart(0, 0, range(1)), HeadPart(2, 1, range(1)))  # all ranks have the same head


def ranks_of(pages: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """The pages of each rank, from [page][layer][side][head][token][head_dim]."""
    owned = [kv_heads_of(rank, num_ranks, pages.shape[3]) for rank in range(num_ranks)]
    return [np.ascontiguousarray(pages[:, :, :, heads.start : heads.stop]) for heads in owned]


@given(
    sizes=st.sampled_from(PAIRS),
    ranks=st.sampled_from([(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (8, 2), (2, 8), (1, 1)]),
    num_tokens=st.integers(1, 26),
)
def test_prompts_arrive_between_nodes_of_any_numbers_of_ranks_and_any_page_sizes(
    sizes: tuple[int, int], ranks: tuple[int, int], num_tokens: int
) -> None:
    ours, theirs = (replace(LAYOUT, page_size=size, num_kv_heads=4) for size in sizes)
    mapping = PageMapping(ours, theirs, num_sources=ranks[0], num_targets=ranks[1])
    told = target_units(
        theirs, mapping.units.per_target // mapping.units.num_parts, num_sources=ranks[0], num_targets=ranks[1]
    )
    source = numbered(ours, ours.num_pages(num_tokens))
    sources = ranks_of(source, ranks[0])
    targets = ranks_of(np.zeros_like(numbered(theirs, theirs.num_pages(num_tokens))), ranks[1])
    for unit in range(mapping.units.count(num_tokens)):
        slices = mapping.slice_pairs[unit % len(mapping.slice_pairs)] or whole_pages(ours)
        assert slices.target == told[unit % mapping.units.per_target]
        from_page = sources[slices.source.rank][unit // mapping.units.per_source]
        to_page = targets[slices.target.rank][unit // mapping.units.per_target]
        copy(slices, memoryview(from_page).cast("B"), memoryview(to_page).cast("B"))
    expected = np.concatenate(list(source), axis=3)[..., :num_tokens, :]
    for rank, pages in enumerate(targets):
        heads = kv_heads_of(rank, ranks[1], 4)
        assert (
            np.concatenate(list(pages), axis=3)[..., :num_tokens, :] == expected[:, :, heads.start : heads.stop]
        ).all()


def test_equal_pages_are_sent_whole() -> None:
    mapping = PageMapping(LAYOUT, LAYOUT)
    assert mapping.slice_pairs == (None,)
    assert (mapping.units.tokens, mapping.units.per_source, mapping.units.per_target) == (4, 1, 1)


def test_page_sizes_of_which_neither_is_a_multiple_of_the_other_do_not_fit() -> None:
    with pytest.raises(AssertionError):
        units_of(4, 6)


@given(st.data())
def test_any_slice_can_be_copied_into_any_other_of_the_same_size(data: st.DataObject) -> None:
    numbers = st.integers(1, 4)
    ours = PageLayout(data.draw(numbers), data.draw(numbers), 2, data.draw(numbers), "float32")
    theirs = replace(ours, page_size=data.draw(numbers), num_kv_heads=data.draw(numbers))
    count = data.draw(st.integers(1, min(ours.page_size, theirs.page_size)))
    num_heads = data.draw(st.integers(1, min(ours.num_kv_heads, theirs.num_kv_heads)))
    tokens = (st.integers(0, page.page_size - count) for page in (ours, theirs))
    heads = (st.integers(0, page.num_kv_heads - num_heads) for page in (ours, theirs))
    a, b = (
        PageSlice(data.draw(token), count, data.draw(head), num_heads)
        for token, head in zip(tokens, heads, strict=True)
    )
    pair = SlicePair(ours, a, theirs, b)
    source, target = numbered(ours, 1)[0], np.zeros_like(numbered(theirs, 1)[0])
    copy(pair, memoryview(source).cast("B"), memoryview(target).cast("B"))
    expected = np.zeros_like(target)
    took = source[:, :, a.head : a.head + num_heads, a.token : a.token + count]
    expected[:, :, b.head : b.head + num_heads, b.token : b.token + count] = took
    assert (target == expected).all()
    assert sum(length for _, _, length in pair.runs) == pair.num_bytes


layouts = st.builds(
    PageLayout,
    num_layers=st.integers(1, 2),
    num_kv_heads=st.just(4),
    head_dim=st.integers(2, 5),
    page_size=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(["float16", "fp8_e4m3", "int8"]),
    value_dim=st.integers(1, 7),
    is_latent=st.booleans(),
)


Place = tuple[int, int, int]  # layer, side, head


def token_of(layout: PageLayout, pages: list[np.ndarray], token: int) -> dict[Place, bytes]:
    """The bytes of one token's keys and values, each followed by its scale if there is one.

    Args:
        pages: of the ranks, which share the heads of a page evenly.
    """
    item = {"float16": 2, "fp8_e4m3": 1, "int8": 1}[layout.dtype]
    found: dict[Place, bytes] = {}
    num_heads = layout.num_kv_heads // len(pages)
    for rank, page in enumerate(pages):
        at = 0
        for layer in range(layout.num_layers):
            for side, dim in enumerate([layout.head_dim] if layout.is_latent else [layout.head_dim, layout.value_dim]):
                for head in range(rank * num_heads, (rank + 1) * num_heads):
                    numbers = page[at + token * dim * item : at + (token + 1) * dim * item].tobytes()
                    at += layout.page_size * dim * item
                    scale = b""
                    if layout.dtype != "float16":
                        scale = page[at + token : at + token + 1].tobytes()
                        at += layout.page_size
                    found[layer, side, head] = numbers + scale
        assert at == len(page)
    return found


@given(
    ours=layouts,
    factor=st.sampled_from([1, 2, 4]),
    is_larger=st.booleans(),
    ranks=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
)
def test_tokens_keep_their_numbers_and_scales_in_every_format(
    ours: PageLayout, factor: int, is_larger: bool, ranks: tuple[int, int]
) -> None:
    """Pages of one size are cut into, or joined to, pages of ``factor`` times the size, between any ranks."""
    theirs = replace(ours, page_size=ours.page_size * factor)
    if is_larger:
        ours, theirs = theirs, ours
    mapping = PageMapping(ours, theirs, num_sources=ranks[0], num_targets=ranks[1])
    num_tokens = max(ours.page_size, theirs.page_size)
    random = np.random.default_rng(0)
    source, target = (
        random.integers(0, 256, (num_tokens // layout.page_size, count, layout.page_bytes // count), np.uint8)
        for layout, count in ((ours, ranks[0]), (theirs, ranks[1]))
    )
    for unit in range(mapping.units.count(num_tokens)):
        pair = mapping.slice_pairs[unit % len(mapping.slice_pairs)] or whole_pages(ours)
        from_page = source[unit // mapping.units.per_source, pair.source.rank]
        to_page = target[unit // mapping.units.per_target, pair.target.rank]
        copy(pair, memoryview(from_page), memoryview(to_page))
        assert sum(length for _, _, length in pair.runs) == pair.num_bytes
    for token in range(num_tokens):
        sent = token_of(ours, list(source[token // ours.page_size]), token % ours.page_size)
        assert token_of(theirs, list(target[token // theirs.page_size]), token % theirs.page_size) == sent


def test_bytes_that_arrive_in_small_parts_fill_the_runs_in_order() -> None:
    memory = bytearray(20)
    with memoryview(memory) as view:
        room = Destination(view, 4, [(0, 4), (8, 3), (12, 4)])
        for data in (b"ab", b"cde", b"f", b"ghij", b"k"):
            at = 0
            for place in room.buffers():
                size = min(len(place), len(data) - at)
                place[:size] = data[at : at + size]
                at += size
                place.release()
            room.filled(len(data))
        assert (room.num_missing, room.num_bytes) == (0, 11)
    assert memory == bytes(4) + b"abcd" + bytes(4) + b"efg" + bytes(1) + b"hijk"
