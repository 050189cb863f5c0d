"""The pools of models with window layers among others: which models can have two, and how large they are."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from common.cache.page_layout import PageLayout, layout_conflict
from common.cache.window_pages import LayerGroups
from common.config.batching import parse_window_ratio
from common.config.node import NodeConfig
from common.errors import ConfigError
from common.node.loading.memory_plan import Capacity, num_window_pages
from common.node.loading.model_loading import layer_groups, memory_layout, with_window_ratio
from common.wire.messages import LayoutMessage

GROUPS = LayerGroups((5,), (0, 1, 2, 3, 4), 512)
LAYOUT = PageLayout(6, 2, 32, 16, "float32")
MIXED: Any = SimpleNamespace(layer_groups=GROUPS, layout=lambda *_: LAYOUT)
UNIFORM: Any = SimpleNamespace(layer_groups=None, layout=lambda *_: LAYOUT)


def test_by_default_a_page_holds_all_layers() -> None:
    assert layer_groups(NodeConfig(), MIXED) is None
    assert memory_layout(NodeConfig(), MIXED, "cpu") == LAYOUT


def test_a_ratio_without_both_kinds_of_layers_or_with_a_recording_is_refused() -> None:
    config = NodeConfig(swa_full_tokens_ratio="0.5")
    assert layer_groups(config, MIXED) == GROUPS
    with pytest.raises(ConfigError, match=r"--swa-full-tokens-ratio 0.5: this model does not have both"):
        layer_groups(config, UNIFORM)
    with pytest.raises(ConfigError, match=r"does not work with --record"):
        layer_groups(NodeConfig(swa_full_tokens_ratio="0.5", record="x"), MIXED)


def test_memory_is_planned_for_the_share_of_window_layers() -> None:
    config = NodeConfig(swa_full_tokens_ratio="0.3")
    layout = memory_layout(config, MIXED, "cpu")
    assert layout.page_bytes == 2.5 * LAYOUT.layer_bytes, "one layer, and 5 at 0.3"
    assert layout.pool_bytes(10) == 10 * layout.page_bytes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.2),  # at most 50 pages are 800 tokens: window, chunk, and what is cut off by pages; an eighth is 4,096
        ({"context_length": 8_192}, 0.79),
        ({"context_length": 4_096}, 1.0),
        ({"max_total_tokens": 131_072, "max_running_requests": 8}, 0.05),  # 16,384 tokens for each request
        ({"max_total_tokens": 1_608}, 0.5),  # one request must fit
        ({"chunked_prefill_size": 16}, 0.14),
        ({"chunked_prefill_size": -1}, 1.0),
        ({"device": "cuda"}, 1.0),  # chunks of 8,192 tokens
        ({"record": "x"}, 1.0),
    ],
)
def test_auto_is_what_a_request_holds_in_window_layers_by_what_it_usually_has(
    options: dict[str, Any], expected: float
) -> None:
    config, model = NodeConfig(swa_full_tokens_ratio="auto", **options), SimpleNamespace(context_length=32_768)
    model.layer_groups = GROUPS
    chosen: Any = with_window_ratio(config, model, options.get("device", "cpu"))  # type: ignore[arg-type]
    assert float(chosen.swa_full_tokens_ratio) == expected
    model.layer_groups = None
    assert with_window_ratio(config, model, "cpu").swa_full_tokens_ratio == "1"  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["0", "0.001", "1.5", "-1", "nan", "half", ""])
def test_a_ratio_that_is_no_number_in_range_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--swa-full-tokens-ratio .*: give auto, or a number from 0.01 to 1"):
        parse_window_ratio(given)
    assert (parse_window_ratio("auto"), parse_window_ratio("0.01"), parse_window_ratio("1")) == (None, 0.01, 1.0)


@pytest.mark.parametrize(
    ("num_pages", "chunk_tokens", "expected"),
    [
        (10_000, 256, 1_000),
        (500, 256, 50),  # a request with a window of 512 and up to 271 new tokens holds at most 50 pages
        (490, 256, "49 of 490 pages, too few for the 50 that one request can hold"),
        (10_000, None, "too few for prompts that are computed whole"),
    ],
)
def test_there_are_window_pages_for_one_request_at_least(
    num_pages: int, chunk_tokens: int | None, expected: int | str
) -> None:
    config, capacity = NodeConfig(swa_full_tokens_ratio="0.1"), Capacity(8, num_pages, 8, chunk_tokens)
    assert num_window_pages(config, None, capacity, num_pages) == num_pages
    if isinstance(expected, int):
        assert num_window_pages(config, GROUPS, capacity, num_pages) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        num_window_pages(config, GROUPS, capacity, num_pages)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3])
def test_a_request_that_decodes_has_window_pages_for_its_steps_however_short_chunks_are(chunk_tokens: int) -> None:
    """Two steps that are not committed, and the next one, see 514 tokens."""
    config = NodeConfig(page_size=1, swa_full_tokens_ratio="0.1")
    with pytest.raises(ConfigError, match="513 of 5130 pages, too few for the 514 that one request can hold"):
        num_window_pages(config, GROUPS, Capacity(8, 5_130, 8, chunk_tokens), 5_130)
    assert num_window_pages(config, GROUPS, Capacity(8, 5_140, 8, chunk_tokens), 5_140) == 514


def test_nodes_with_one_pool_and_with_two_are_no_pair() -> None:
    slab = GROUPS.layout_of(LAYOUT)
    assert (slab.num_layers, slab.full_slabs, slab.window_slabs) == (1, 1, 5)
    assert "--swa-full-tokens-ratio" in layout_conflict(slab, LAYOUT)
    assert layout_conflict(slab, slab) == ""
    other = LayerGroups((4, 5), (0, 1, 2, 3), 512).layout_of(LAYOUT)
    assert layout_conflict(slab, other) == "layers 1 and 2 must be equal"
    small = GROUPS.layout_of(PageLayout(6, 2, 32, 8, "float32"))
    assert "page sizes 16 and 8 must be equal" in layout_conflict(slab, small)


def test_a_layout_survives_the_wire() -> None:
    slab = GROUPS.layout_of(LAYOUT)
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(LayoutMessage.of(slab)), type=LayoutMessage)
    assert message.layout() == slab
