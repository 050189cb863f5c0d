"""A decode node computes chunks in the same steps as decode rows, or alternates between the two."""

import pytest

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.config.scheduling import SchedulingOptions
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.chunked_prefill import ChunkAlignment
from common.scheduling.policies.factory import make_ordering
from common.step_plan import StepResult
from decode_node.scheduler import DecodeLimits, DecodeScheduler, Sampled


class Node:
    """A decode scheduler that computes prompts itself, eight tokens per step."""

    def __init__(self, *, is_mixed: bool, alignment: ChunkAlignment | None = None) -> None:
        allocator = PageAllocator(100)
        cache = RadixCache(allocator, 4)
        self.scheduler = DecodeScheduler(
            cache,
            allocator,
            limits=DecodeLimits(8, chunk_tokens=8, is_mixed=is_mixed, alignment=alignment or ChunkAlignment()),
            ordering=make_ordering(SchedulingOptions(), cache),
            eos_token_ids=(),
            is_connected=lambda source: False,
        )
        self.done: dict[str, int] = {}

    def submit(self, rid: str, length: int, *, new: int = 50) -> None:
        prompt = tuple(range(len(rid) * 1_000, len(rid) * 1_000 + length))
        self.scheduler.submit(Request(rid, 0, prompt, SamplingParams(max_new_tokens=new)), source=None)

    def step(self) -> tuple[int, int]:
        """Number of chunk tokens and of decode rows in the next step; (0, 0) if there is none."""
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return 0, 0
        chunks = sum(row.num_tokens for row in plan.rows if row.tokens is not None)
        for sampled in self.scheduler.commit(StepResult(plan.step, (7,) * sum(row.sample for row in plan.rows))):
            if isinstance(sampled, Sampled) and sampled.finish:
                self.done[sampled.request.rid] = len(sampled.request.output)
        self.scheduler.check()
        return chunks, sum(row.tokens is None for row in plan.rows)


def test_mixed_chunks_share_steps_with_decode_rows() -> None:
    node = Node(is_mixed=True)
    node.submit("a", 4)
    assert node.step() == (4, 0)
    node.submit("bb", 20)
    assert [node.step() for _ in range(5)] == [(8, 1), (8, 1), (4, 1), (0, 2), (0, 2)]


def test_without_mixing_chunks_and_decode_rows_alternate() -> None:
    node = Node(is_mixed=False)
    node.submit("a", 4)
    assert node.step() == (4, 0)
    node.submit("bb", 20)
    assert [node.step() for _ in range(7)] == [(0, 1), (8, 0), (0, 1), (8, 0), (0, 1), (4, 0), (0, 2)]


def test_without_mixing_chunks_are_consecutive_while_nothing_decodes() -> None:
    node = Node(is_mixed=False)
    node.submit("a", 20)
    assert [node.step() for _ in range(4)] == [(8, 0), (8, 0), (4, 0), (0, 1)]


@pytest.mark.parametrize("is_mixed", [True, False])
def test_every_request_ends_with_and_without_mixing(is_mixed: bool) -> None:
    node = Node(is_mixed=is_mixed)
    for number, length in enumerate((3, 30, 17, 9), start=1):
        node.submit("r" * number, length, new=5 + number)
    for _ in range(100):
        node.step()
    assert node.done == {"r": 6, "rr": 7, "rrr": 8, "rrrr": 9}


def test_prompts_are_chunked_on_a_decode_node_as_on_a_prefill_node() -> None:
    node = Node(is_mixed=True, alignment=ChunkAlignment(1, 8.0))
    node.submit("a", 20)
    # A step may cost work(8, 0, 8) = 64 + 32. After 8 tokens, sqrt(16^2 + 192) - 16 = 5.2 tokens fit: one page.
    assert [node.step() for _ in range(3)] == [(8, 0), (4, 0), (4, 0)]
