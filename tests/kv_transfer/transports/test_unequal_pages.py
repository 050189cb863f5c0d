"""Pages that are longer on one node than on the other, on every transport, between real processes."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.kv.kv_fakes import DECODE, PREFILL
from support.kv.transport_ends import End, join
from support.kv.transport_process import LAYOUT, page_content
from support.waiting import until

from common.cache.page_layout import PageLayout
from kv_transfer.page_mapping import PageMapping
from kv_transfer.page_slices import copy


def cut_anew(sources: list[bytes], ours: PageLayout, theirs: PageLayout) -> list[bytearray]:
    """Return the same tokens in pages of the other size; ``test_page_slices`` verifies the copy token by token."""
    mapping = PageMapping(ours, theirs)
    units = mapping.units
    num_units = len(sources) * units.per_source
    targets = [bytearray(theirs.page_bytes) for _ in range(units.num_target_pages(num_units))]
    for unit in range(num_units):
        pair = mapping.slice_pairs[unit % len(mapping.slice_pairs)]
        assert pair is not None
        copy(pair, memoryview(sources[unit // units.per_source]), memoryview(targets[unit // units.per_target]))
    return targets


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize(
    ("source_size", "target_size", "sources", "fields"),
    [(16, 32, (3, 1, 2, 0), {}), (32, 8, (3, 1), {"dtype": "fp8_e4m3", "value_dim": 192})],
    ids=["longer", "shorter in fp8 with short values"],
)
def test_slices_of_pages_arrive_unchanged_from_another_process(
    start: Callable[..., End],
    transport: str,
    source_size: int,
    target_size: int,
    sources: tuple[int, ...],
    fields: dict[str, Any],
) -> None:
    writer = start("writer", transport, TEST_LAYOUT=json.dumps({**fields, "page_size": source_size}))
    reader = start("reader", transport, TEST_LAYOUT=json.dumps({**fields, "page_size": target_size}))
    join(writer, reader, transport)
    ours, theirs = (replace(LAYOUT, **{**fields, "page_size": size}) for size in (source_size, target_size))
    expected = cut_anew([page_content(page, ours) for page in sources], ours, theirs)
    num_units = len(sources) * source_size // min(source_size, target_size)
    per_source, per_target = num_units // len(sources), max(1, target_size // source_size)
    targets = [2 * index + 1 for index in range(num_units // per_target)]
    reader.ask("allow", peer=PREFILL, epoch=1, pages=targets)
    tickets = []
    for unit in range(num_units):
        source = sources[unit // per_source]
        pages = [(source, source, targets[unit // per_target])]  # each page is seeded with its own number
        tickets.append(writer.ask("write", peer=DECODE, pages=pages, slices=unit % max(per_source, per_target)))
    finished: list[int] = []
    until(lambda: finished.extend(writer.ask("finished")) or len(finished) == num_units)
    assert sorted(finished) == tickets
    assert reader.ask("digest", pages=targets) == [hashlib.sha256(page).hexdigest() for page in expected]
    untouched = [page for page in range(16) if page not in targets]
    assert set(reader.ask("digest", pages=untouched)) == {hashlib.sha256(bytes(theirs.page_bytes)).hexdigest()}
    assert writer.ask("counters")[f"bytes_by_{transport}"] == len(sources) * ours.page_bytes
