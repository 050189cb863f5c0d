"""Pages that are longer on one node than on the other, on every transport, between real processes."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.kv.kv_fakes import DECODE, PREFILL
from support.kv.transport_ends import End, join, until
from support.kv.transport_process import LAYOUT, page_content


def prompt_of(pages: list[np.ndarray]) -> np.ndarray:
    """Concatenates pages of shape [layer][side][head][token][head_dim] along the token dimension."""
    return np.concatenate(pages, axis=3)


@pytest.mark.parametrize(
    ("source_size", "target_size", "sources"), [(16, 32, (3, 1, 2, 0)), (32, 8, (3, 1))], ids=["longer", "shorter"]
)
def test_slices_of_pages_arrive_unchanged_from_another_process(
    start: Callable[..., End], transport: str, source_size: int, target_size: int, sources: tuple[int, ...]
) -> None:
    writer = start("writer", transport, TEST_PAGE_SIZE=str(source_size))
    reader = start("reader", transport, TEST_PAGE_SIZE=str(target_size))
    join(writer, reader, transport)
    ours, theirs = replace(LAYOUT, page_size=source_size), replace(LAYOUT, page_size=target_size)
    shape = (ours.num_layers, 2, ours.num_kv_heads, ours.page_size, ours.head_dim)
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
    prompt = prompt_of([np.frombuffer(page_content(page, ours), np.float32).reshape(shape) for page in sources])
    expected = [prompt[..., i * target_size : (i + 1) * target_size, :].tobytes() for i in range(len(targets))]
    assert reader.ask("digest", pages=targets) == [hashlib.sha256(page).hexdigest() for page in expected]
    untouched = [page for page in range(16) if page not in targets]
    assert set(reader.ask("digest", pages=untouched)) == {hashlib.sha256(bytes(theirs.page_bytes)).hexdigest()}
    assert writer.ask("counters")[f"bytes_by_{transport}"] == len(sources) * ours.page_bytes
