"""Slices of pages: where their bytes lie, and that copying them equals a plain gather and scatter."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cache.page_layout import PageLayout
from kv_transfer.page_mapping import PageMapping, units_of
from kv_transfer.page_slices import PageSlice, SlicePair, copy, whole, whole_pages
from kv_transfer.transports.tcp.receive_thread import Destination

LAYOUT = PageLayout(num_layers=2, num_kv_heads=3, head_dim=2, page_size=4, dtype="float32")  # 8 bytes per token
SIZES = (1, 2, 3, 4, 6, 8, 12)
PAIRS = [(s, t) for s in SIZES for t in SIZES if s % t == 0 or t % s == 0]


def shape_of(layout: PageLayout) -> tuple[int, ...]:
    return (layout.num_layers, 2, layout.num_kv_heads, layout.page_size, layout.head_dim)


def numbered(layout: PageLayout, num_pages: int, first: int = 1) -> np.ndarray:
    """Pages filled with consecutive numbers, beginning at ``first``."""
    count = num_pages * layout.page_bytes // 4
    return np.arange(first, first + count, dtype=np.int32).reshape(num_pages, *shape_of(layout))


def test_a_whole_page_is_one_run() -> None:
    assert whole(LAYOUT).runs(LAYOUT) == [(0, LAYOUT.page_bytes)]
    assert whole(LAYOUT).num_bytes(LAYOUT) == LAYOUT.page_bytes == 2 * 2 * 3 * 4 * 8


def test_a_slice_is_one_run_for_each_layer_side_and_head() -> None:
    page_slice = PageSlice(2, 2)
    assert page_slice.runs(LAYOUT) == [(16 + 32 * plane, 16) for plane in range(12)]
    assert page_slice.num_bytes(LAYOUT) == 192


@pytest.mark.parametrize("page_slice", [PageSlice(2, 3), PageSlice(4, 1), PageSlice(0, 0), PageSlice(-1, 1)])
def test_a_slice_that_is_empty_or_exceeds_the_page_is_not_within_it(page_slice: PageSlice) -> None:
    assert not page_slice.is_within(LAYOUT)


slices = st.builds(PageSlice, st.integers(0, 4), st.integers(1, 4))


@given(one=slices, other=slices)
def test_two_slices_overlap_if_they_share_a_token(one: PageSlice, other: PageSlice) -> None:
    def tokens(page_slice: PageSlice) -> set[int]:
        return set(range(page_slice.token, page_slice.token + page_slice.num_tokens))

    assert one.overlaps(other) == other.overlaps(one) == bool(tokens(one) & tokens(other))


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
            index, part = divmod(unit, mapping.units.per_target)
            from_page, to_page = (
                memoryview(source[unit // mapping.units.per_source]).cast("B"),
                memoryview(target[index]).cast("B"),
            )
            if slices is None:
                to_page[:] = from_page
            else:
                copy(slices, from_page, to_page)
            told.append((index, part))
            assert unit in mapping.units.of_target(index)
        assert len(set(told)) == len(told)
        # [page][layer][side][head][token] -> [layer][side][head][token of the prompt]
        flat_source = np.concatenate(list(source), axis=3)[..., :num_tokens, :]
        flat_target = np.concatenate(list(target), axis=3)[..., :num_tokens, :]
        assert (flat_source == flat_target).all()


def test_equal_pages_are_sent_whole() -> None:
    mapping = PageMapping(LAYOUT, LAYOUT)
    assert mapping.slice_pairs == (None,)
    assert (mapping.units.tokens, mapping.units.per_source, mapping.units.per_target) == (4, 1, 1)


def test_page_sizes_of_which_neither_is_a_multiple_of_the_other_do_not_fit() -> None:
    with pytest.raises(AssertionError):
        units_of(4, 6)


@given(st.data())
def test_any_slice_can_be_copied_into_any_other_of_the_same_length(data: st.DataObject) -> None:
    numbers = st.integers(1, 4)
    ours = PageLayout(data.draw(numbers), data.draw(numbers), 2, data.draw(numbers), "float32")
    theirs = replace(ours, page_size=data.draw(numbers))
    count = data.draw(st.integers(1, min(ours.page_size, theirs.page_size)))
    a, b = (PageSlice(data.draw(st.integers(0, page.page_size - count)), count) for page in (ours, theirs))
    pair = SlicePair(ours, a, theirs, b)
    source, target = numbered(ours, 1)[0], np.zeros_like(numbered(theirs, 1)[0])
    copy(pair, memoryview(source).cast("B"), memoryview(target).cast("B"))
    expected = np.zeros_like(target)
    expected[:, :, :, b.token : b.token + count] = source[:, :, :, a.token : a.token + count]
    assert (target == expected).all()
    assert sum(length for _, _, length in pair.runs) == pair.num_bytes


layouts = st.builds(
    PageLayout,
    num_layers=st.integers(1, 2),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(2, 5),
    page_size=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(["float16", "fp8_e4m3"]),
    value_dim=st.integers(1, 7),
    is_latent=st.booleans(),
)


def token_of(layout: PageLayout, page: np.ndarray, token: int) -> list[bytes]:
    """The bytes of one token: of each key and each value its numbers, then its scale if there are scales."""
    item = {"float16": 2, "fp8_e4m3": 1}[layout.dtype]
    found, at = [], 0
    for _ in range(layout.num_layers):
        for dim in [layout.head_dim] if layout.is_latent else [layout.head_dim, layout.value_dim]:
            for _ in range(layout.num_kv_heads):
                found.append(page[at + token * dim * item : at + (token + 1) * dim * item].tobytes())
                at += layout.page_size * dim * item
                if layout.dtype == "fp8_e4m3":
                    found.append(page[at + token : at + token + 1].tobytes())
                    at += layout.page_size
    assert at == layout.page_bytes == len(page)
    return found


@given(ours=layouts, factor=st.sampled_from([1, 2, 4]), is_larger=st.booleans())
def test_tokens_keep_their_numbers_and_scales_in_every_format(ours: PageLayout, factor: int, is_larger: bool) -> None:
    """Pages of one size are cut into, or joined to, pages of ``factor`` times the size."""
    theirs = replace(ours, page_size=ours.page_size * factor)
    if is_larger:
        ours, theirs = theirs, ours
    mapping = PageMapping(ours, theirs)
    num_tokens = max(ours.page_size, theirs.page_size)
    random = np.random.default_rng(0)
    source = random.integers(0, 256, (num_tokens // ours.page_size, ours.page_bytes), np.uint8)
    target = np.zeros((num_tokens // theirs.page_size, theirs.page_bytes), np.uint8)
    for unit in range(mapping.units.count(num_tokens)):
        pair = mapping.slice_pairs[unit % len(mapping.slice_pairs)] or whole_pages(ours)
        from_page, to_page = source[unit // mapping.units.per_source], target[unit // mapping.units.per_target]
        copy(pair, memoryview(from_page), memoryview(to_page))
        assert sum(length for _, _, length in pair.runs) == pair.num_bytes
    for token in range(num_tokens):
        sent = token_of(ours, source[token // ours.page_size], token % ours.page_size)
        assert token_of(theirs, target[token // theirs.page_size], token % theirs.page_size) == sent


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
