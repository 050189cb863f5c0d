"""Chunk boundaries, and steps that take equally long whatever the length of the prefix."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cache.page_allocator import PageAllocator
from common.cache.page_layout import PageLayout
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import cache_computed
from common.config.node import NodeConfig
from common.engine.models.config import ModelConfig
from common.errors import ConfigError
from common.node.loading.memory_plan import plan_capacity
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.chunked_prefill import ChunkAlignment, prefill_work, tokens_within
from common.scheduling.prefill_adder import AddResult, PrefillAdder, PrefillLimits

PAGE = 4


class Pool:
    """The cache of a prefill node, on which requests are computed step by step."""

    def __init__(self, chunk_tokens: int, alignment: ChunkAlignment) -> None:
        self.allocator = PageAllocator(4_000)
        self.cache = RadixCache(self.allocator, PAGE)
        self.limits = PrefillLimits(8, max_prefill_tokens=1 << 30, chunk_tokens=chunk_tokens, alignment=alignment)

    def adder(self) -> PrefillAdder:
        return PrefillAdder(self.cache, self.allocator, self.limits, total_tokens=16_001, reserve_output=False)

    def commit(self, adder: PrefillAdder) -> None:
        for chunk in adder.chunks:
            chunk.request.num_computed = chunk.start + chunk.num_tokens
            cache_computed(self.cache, chunk.request)

    def chunks_of(self, length: int) -> list[tuple[int, int]]:
        """(start, tokens) of the steps in which a prompt of this length is computed alone."""
        request = Request("r", 0, tuple(range(length)), SamplingParams())
        chunks = []
        while request.num_computed < length:
            adder = self.adder()
            add = adder.add_chunked_req if request.pages else adder.add_one_req
            assert add(request) is AddResult.CONTINUE
            chunks += [(chunk.start, chunk.num_tokens) for chunk in adder.chunks]
            self.commit(adder)
        return chunks


def test_prefill_work_adds_crossover_and_attended_tokens() -> None:
    # Three tokens behind ten others: each costs 100, and attends to 10; among themselves 3 * 3 / 2.
    assert prefill_work(100.0, 10, 3) == 3 * 100 + 3 * 10 + 4.5


@settings(deadline=None)
@given(crossover=st.floats(0.0, 1e5), start=st.integers(0, 200_000), num_tokens=st.integers(1, 20_000))
def test_tokens_within_is_the_inverse_of_prefill_work(crossover: float, start: int, num_tokens: int) -> None:
    assert tokens_within(crossover, start, prefill_work(crossover, start, num_tokens) + 0.1) in (
        num_tokens,
        num_tokens + 1,
    )
    assert tokens_within(crossover, start, prefill_work(crossover, start, num_tokens) * 0.999999 - 1) <= num_tokens


def test_without_a_crossover_all_chunks_have_one_size() -> None:
    assert Pool(16, ChunkAlignment()).chunks_of(40) == [(0, 16), (16, 16), (32, 8)]


def test_chunks_shrink_as_the_prefix_grows() -> None:
    # A step may hold prefill_work(64, 0, 64) = 64 * 64 + 2048 = 6,144. Behind 64: sqrt(128^2 + 12,288) - 128 = 41.3, so
    # 40; behind 104: sqrt(168^2 + 12,288) - 168 = 33.3, so 32; behind 136: sqrt(200^2 + 12,288) - 200 = 28.7, so 28.
    assert Pool(64, ChunkAlignment(1, 64.0)).chunks_of(200) == [
        (0, 64),
        (64, 40),
        (104, 32),
        (136, 28),
        (164, 24),
        (188, 12),
    ]


@settings(deadline=None)
@given(
    chunk=st.integers(4, 200),
    length=st.integers(1, 800),
    crossover=st.floats(1.0, 1e4),
    align=st.sampled_from([1, 6, 8]),
)
def test_every_step_but_the_last_is_as_full_as_the_alignment_allows(
    chunk: int, length: int, crossover: float, align: int
) -> None:
    cut = ChunkAlignment(align, crossover)
    unit = cut.unit(PAGE)
    budget = prefill_work(crossover, 0, max(chunk, unit))
    chunks = Pool(chunk, cut).chunks_of(length)
    assert [start for start, _ in chunks] == [sum(count for _, count in chunks[:n]) for n in range(len(chunks))]
    assert sum(count for _, count in chunks) == length
    for start, count in chunks[:-1]:
        assert (start + count) % unit == 0
        assert count == unit or prefill_work(crossover, start, count) <= budget
        assert prefill_work(crossover, start, count + unit + 1) > budget or count + unit > max(chunk, unit)


def test_short_prompts_behind_a_long_tail_are_bounded_by_tokens_and_by_work() -> None:
    pool = Pool(64, ChunkAlignment(1, 64.0))
    long = Request("long", 0, tuple(range(1_000, 1_092)), SamplingParams())
    adder = pool.adder()
    adder.add_one_req(long)
    pool.commit(adder)
    adder = pool.adder()
    assert adder.add_chunked_req(long) is AddResult.CONTINUE  # 28 behind 64: work 28 * 128 + 392 = 3,976 of 6,144
    short = Request("short", 0, tuple(range(60)), SamplingParams())
    assert adder.add_one_req(short) is AddResult.CONTINUE
    # 2,168 is left: sqrt(64^2 + 4,336) - 64 = 27.8, so 24 of its tokens, where 36 would fit by number alone.
    assert [(chunk.start, chunk.num_tokens) for chunk in adder.chunks] == [(64, 28), (0, 24)]


def test_chunks_end_at_multiples_of_the_alignment_and_of_the_page() -> None:
    # 6 and pages of 4 make 12.
    assert Pool(20, ChunkAlignment(6)).chunks_of(50) == [(0, 12), (12, 12), (24, 12), (36, 14)]
    pool = Pool(20, ChunkAlignment(6))
    pool.chunks_of(8)  # two pages are cached
    assert pool.chunks_of(50) == [(8, 16), (24, 12), (36, 14)]


def test_a_prompt_that_fits_whole_is_not_cut_at_the_alignment() -> None:
    assert Pool(20, ChunkAlignment(6)).chunks_of(19) == [(0, 19)]


LAYOUT = PageLayout(1, 1, 8, 4, "float32")


def test_the_options_reach_the_node() -> None:
    config = NodeConfig(truncation_align_size=32, enable_dynamic_chunking=True, chunked_prefill_size=64)
    capacity = plan_capacity(config, LAYOUT, device="cpu", context_length=100, crossover_tokens=7.0)
    assert capacity.alignment == ChunkAlignment(32, 7.0)
    assert plan_capacity(NodeConfig(), LAYOUT, device="cpu", context_length=100).alignment == ChunkAlignment()


def test_an_alignment_larger_than_a_chunk_is_refused() -> None:
    config = NodeConfig(truncation_align_size=65, chunked_prefill_size=64)
    with pytest.raises(ConfigError, match="--truncation-align-size 65 exceeds --chunked-prefill-size 64"):
        plan_capacity(config, LAYOUT, device="cpu", context_length=100)


def test_options_for_long_prompts_are_refused_where_the_alignment_lets_no_two_share_a_chunk() -> None:
    for alignment in (None, 32):
        config = NodeConfig(truncation_align_size=alignment, chunked_prefill_size=64, long_prompt_share=0.3)
        plan_capacity(config, LAYOUT, device="cpu", context_length=100)
    config = NodeConfig(truncation_align_size=48, chunked_prefill_size=64, long_prompt_share=0.3)
    with pytest.raises(ConfigError, match="--long-prompt-share has no effect with --chunked-prefill-size 64"):
        plan_capacity(config, LAYOUT, device="cpu", context_length=100)


@pytest.mark.parametrize("name", ["enable_dynamic_chunking", "truncation_align_size"])
def test_chunk_options_without_chunks_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} has no effect with --chunked-prefill-size -1"):
        NodeConfig(chunked_prefill_size=-1, **{name: 16})


def test_the_crossover_follows_from_the_models_shape() -> None:
    model = ModelConfig.load(NodeConfig().model)
    heads = model.num_heads * model.head_dim
    kv_heads = model.num_kv_heads * model.head_dim
    per_layer = model.hidden_size * (heads + 2 * kv_heads + heads + 3 * model.intermediate_size)
    assert model.crossover_tokens == per_layer / (2 * heads)
