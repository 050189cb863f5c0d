"""Long and short prompts share the chunk budget of each step; on prefill nodes, and on decode nodes that compute."""

import itertools
import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.scheduling.single_nodes import DecodeNode, PrefillNode

from common.cache.tree_node import TOKEN_BYTES
from common.config.scheduling import POLICIES, PriorityRules
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling import long_prompts
from common.scheduling.chunked_prefill import ChunkAlignment
from common.scheduling.prefill_adder import LongPromptLimits

PAGE, CHUNK = 4, 16
OFF = PriorityRules()


def node(**options: object) -> PrefillNode:
    return PrefillNode(num_pages=4_000, slots=64, **{"rules": OFF, "chunk": CHUNK, **options})


# ---- one step by hand -----------------------------------------------------------------------------------------------


def test_a_short_prompt_is_computed_beside_a_long_one() -> None:
    at = node()
    at.submit("long", 80)
    assert at.step() == [("long", 16)]
    at.submit("short", 6)
    assert at.step() == [("short", 6), ("long", 8)]  # six tokens fill two pages of the short prompts' half


def test_long_prompts_get_the_whole_step_when_no_shorter_one_waits() -> None:
    at = node()
    at.submit("long", 48)
    assert [at.step(), at.step(), at.step()] == [[("long", 16)]] * 3


def test_short_prompts_get_what_they_need_of_their_share_and_no_more() -> None:
    at = node()
    at.submit("long", 80)
    at.step()
    for number in range(4):
        at.submit(f"short {number}", 8)
    assert at.step() == [("short 0", 8), ("long", 8)]
    assert at.step() == [("short 1", 8), ("long", 8)]


def test_the_short_prompt_with_the_fewest_tokens_left_goes_first() -> None:
    at = node(long_prompts=LongPromptLimits(threshold=40))
    at.submit("40", 40)
    at.submit("20", 20)
    at.submit("24", 24)
    assert at.step() == [("40", 16)]
    assert at.step() == [("40", 16)]  # the others have not begun
    assert at.step() == [("40", 8), ("20", 8)]
    assert at.step() == [("20", 12), ("24", 4)]


def test_a_new_long_prompt_does_not_wait_for_the_end_of_a_longer_one() -> None:
    at = node()
    at.submit("giant", 400)
    at.step()
    at.submit("long", 24)
    steps = [at.step() for _ in range(4)]
    assert "long" in at.done and sum(count for step in steps for _, count in step) == 4 * CHUNK
    assert at.run() == ["long", "giant"]


def test_no_more_long_prompts_begin_than_allowed() -> None:
    at = node(long_prompts=LongPromptLimits(max_begun=2))
    for number in range(4):
        at.submit(f"long {number}", 64)
    seen: dict[str, int] = {}
    while step := at.step():
        for rid, count in step:
            seen[rid] = seen.get(rid, 0) + count
        assert sum(0 < done < 64 for done in seen.values()) <= 2
    assert at.done[0] == "long 0"


def test_a_prompt_does_not_wait_for_a_long_one_like_it_that_adds_nothing_to_the_cache() -> None:
    at = node()
    page = (0, 1, 2, 3)  # all three begin with it; the short prompt is the first to have it in the cache
    long = (*page, *range(100, 160))
    prompts = {"short": (*page, *range(10, 14)), "long": long, "like it": (*long[:16], *range(20, 24))}
    requests = [Request(rid, 0, prompt, SamplingParams(max_new_tokens=9)) for rid, prompt in prompts.items()]
    at.scheduler.submit(requests[0])
    at.scheduler.submit(requests[1])
    assert at.step() == [("short", 8), ("long", 8)]
    at.scheduler.submit(requests[2])
    assert at.step() == [("like it", 8), ("long", 8)]


def noting(packed: bytes, read: list[int]) -> bytes:
    """Tokens in packed form that note in ``read`` how many of their bytes are read at once."""

    class Noting(bytes):
        def __getitem__(self, part: Any) -> Any:
            found = super().__getitem__(part)
            read.append(len(found))
            return found

    return Noting(packed)


def test_a_prompt_is_compared_with_a_long_one_like_it_by_no_more_than_a_page() -> None:
    at = node()
    long = at.submit("long", 400, first=0)
    for _ in range(10):
        at.step()
    like_it = at.submit("like it", 400, first=0)
    assert like_it.watch is not None and like_it.watch.num_tokens == 10 * CHUNK
    read: list[int] = []
    long.packed, like_it.watch.key = noting(long.packed, read), noting(like_it.watch.key, read)
    assert not at.scheduler._long_prompts.may_begin(like_it, [long])
    assert read and max(read) <= PAGE * TOKEN_BYTES


def test_without_a_cache_no_prompt_waits_for_a_long_one_like_it() -> None:
    at = node()
    at.cache.is_enabled = False
    at.submit("long", 80, first=0)
    at.step()
    at.submit("short", 8, first=0)
    assert at.step() == [("short", 8), ("long", 8)]


def test_a_more_urgent_prompt_does_not_share_with_a_less_urgent_long_one() -> None:
    at = node(rules=PriorityRules(is_enabled=True))
    at.submit("long", 80, 0)
    at.step()
    at.submit("urgent", 16, 1)
    at.submit("lazy", 4, -1)
    assert at.step() == [("urgent", 16)]
    assert at.step() == [("long", 16)]


@pytest.mark.parametrize("first", [5000, 9000])
def test_an_urgent_prompt_does_not_wait_for_a_less_urgent_long_one_that_computes_its_prefix(first: int) -> None:
    rules = PriorityRules(is_enabled=True, preemption_threshold=2)
    node = PrefillNode(num_pages=300, chunk=16, rules=rules, long_prompts=LongPromptLimits(threshold=40))
    node.submit("less urgent", 64, 0, first=5000)
    node.step()
    node.submit("long", 200, 9)
    node.step()
    node.submit("short", 24, 9, first=first)
    for _ in range(5):
        node.step()
    assert node.done == ["short"]


def test_a_step_of_one_prompt_and_a_chunk_of_one_page_share_nothing() -> None:
    for options in ({"max_prefill_tokens": 1}, {"chunk": PAGE}):
        at = PrefillNode(rules=OFF, **{"chunk": CHUNK, **options})
        at.submit("long", 40)
        at.step()
        at.submit("short", 4)
        assert at.run() == ["long", "short"]


def test_a_long_prompt_proceeds_although_its_attention_fills_the_step() -> None:
    """With dynamic chunking a step holds a bounded amount of work, of which short prompts take most."""
    at = node(alignment=ChunkAlignment(crossover_tokens=1.0), chunk=64)
    at.submit("long", 800)
    for _ in range(30):
        at.step()
    for number in range(40):
        at.submit(f"short {number}", 30)
    for _ in range(10):
        assert dict(at.step()).get("long", 0) >= PAGE


def test_waiting_prompts_are_compared_with_begun_long_ones_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def is_computing_for(request: Request, other: Request, page_size: int) -> bool:
        compared.append(other.rid)
        return False

    monkeypatch.setattr(long_prompts, "_is_computing_for", is_computing_for)
    at = node()
    for number in range(50):
        at.submit(f"{number}", 40)
    assert [at.step(), at.step()] == [[("0", 16)], [("1", 8), ("0", 8)]]
    assert set(compared) == {"0", "1"} and len(compared) <= 2 * 2 * 2 * 50  # two steps, each tries a prompt twice


def test_local_prompts_of_a_decode_node_share_its_steps() -> None:
    at = DecodeNode(num_pages=200, rules=OFF, is_mixed=True)  # chunks of 8 tokens
    at.submit("giant", 400, new=1, is_local=True)
    at.step()
    at.submit("short", 4, new=1, is_local=True)
    assert at.step() == ["short"]
    assert at.run() == ["short", "giant"]


# ---- what holds for all histories -----------------------------------------------------------------------------------

PROMPTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 120)), min_size=1, max_size=24)
KINDS_OF_NODES = pytest.mark.parametrize("is_local", [False, True], ids=["prefill", "decode"])


class LocalPrompts(DecodeNode):
    """A decode node that computes prompts, each with one output token."""

    def submit(self, rid: str, length: int) -> None:
        super().submit(rid, length, new=1, is_local=True)

    def step(self) -> list[tuple[str, int]]:
        super().step()
        return self.chunks


def any_node(*, is_local: bool, **options: Any) -> PrefillNode | LocalPrompts:
    if is_local:
        return LocalPrompts(num_pages=4_000, slots=64, rules=OFF, chunk=CHUNK, is_mixed=True, **options)
    return node(**options)


def play(at: PrefillNode | LocalPrompts, prompts: Sequence[tuple[int, int]]) -> list[list[tuple[str, int]]]:
    """Submit each prompt before the step of its number, and run to the end; return the chunks of all steps."""
    steps = []
    for number in itertools.count():
        for index, (arrival, length) in enumerate(prompts):
            if arrival == number:
                at.submit(f"{index}", length)
        steps.append(at.step())
        if number >= max(arrival for arrival, _ in prompts) and not steps[-1]:
            return steps
    raise AssertionError


def rounded(count: int) -> int:
    return -(-count // PAGE) * PAGE


@KINDS_OF_NODES
@settings(max_examples=examples(30), deadline=None)
@given(
    prompts=PROMPTS,
    policy=st.sampled_from(POLICIES),
    limits=st.builds(
        LongPromptLimits, st.sampled_from([None, 8, 40]), st.sampled_from([0.25, 0.5, 0.8]), st.integers(1, 3)
    ),
)
def test_no_step_is_filled_less_and_neither_kind_takes_the_share_of_the_other(
    is_local: bool, prompts: list[tuple[int, int]], policy: str, limits: LongPromptLimits
) -> None:
    at = any_node(is_local=is_local, policy=policy, long_prompts=limits)
    threshold = limits.threshold or CHUNK
    part = min(max(int(CHUNK * limits.share), PAGE), CHUNK - PAGE) // PAGE * PAGE
    left = {f"{index}": length for index, (_, length) in enumerate(prompts)}
    begun: set[str] = set()
    for number, step in enumerate(play(at, prompts)):
        there = [f"{i}" for i, (arrival, _) in enumerate(prompts) if arrival <= number and left[f"{i}"]]
        is_long = {rid: prompts[int(rid)][1] > threshold for rid in there}
        wanted = sum(rounded(left[rid]) for rid in there)
        used = {kind: sum(rounded(count) for rid, count in step if is_long[rid] is kind) for kind in (True, False)}
        assert used[True] + used[False] == min(wanted, CHUNK)  # a whole step, if there is so much to do
        short_left = sum(rounded(left[rid]) for rid in there if not is_long[rid])
        assert used[False] >= min(short_left, CHUNK - part)
        long_begun = sum(rounded(left[rid]) for rid in begun if left[rid] and is_long.get(rid))
        assert used[True] >= min(long_begun, part)
        for rid, count in step:
            left[rid] -= count
            begun.add(rid)
        assert sum(is_long[rid] and rid in begun and left[rid] > 0 for rid in there) <= limits.max_begun
    assert not any(left.values())


@KINDS_OF_NODES
@settings(max_examples=examples(25), deadline=None)
@given(
    prompts=PROMPTS,
    policy=st.sampled_from(POLICIES),
    share=st.sampled_from([0.25, 0.5, 0.75]),
    is_in_turns=st.booleans(),
)
def test_no_prompt_ends_later_than_the_shares_say_under_every_policy(
    is_local: bool, prompts: list[tuple[int, int]], policy: str, share: float, is_in_turns: bool
) -> None:
    """A prompt waits only for those of its kind that begin before it, at the rate of its kind. Of the share of long
    prompts every second step is the first one's, if two are in progress."""
    at = any_node(
        is_local=is_local, policy=policy, long_prompts=LongPromptLimits(share=share, max_begun=2 if is_in_turns else 1)
    )
    part = min(max(int(CHUNK * share), PAGE), CHUNK - PAGE) // PAGE * PAGE
    ends: dict[int, int] = {}  # number of the step, in the order in which the prompts begin
    for number, step in enumerate(play(at, prompts)):
        for rid, _ in step:
            ends[int(rid)] = number
    for kind, rate in ((True, part / (2 if is_in_turns else 1)), (False, CHUNK - part)):
        order = [index for index in ends if (prompts[index][1] > CHUNK) is kind]
        if policy == "fcfs":
            assert order == sorted(order, key=lambda index: (prompts[index][0], index))
        busy_until = 0.0
        for index in order:
            arrival, length = prompts[index]
            # Rounded up to whole steps for each prompt: the chunk before it may end anywhere in a step.
            busy_until = max(busy_until, arrival) + rounded(length) / rate + 2
            assert ends[index] <= math.ceil(busy_until)


# ---- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_begun", [1, 2, 3])
def test_the_pool_never_stands_still_with_half_computed_prompts(max_begun: int) -> None:
    """All orders of three prompts on pools that hold the largest of them and little more: every step computes
    something, and every prompt ends."""
    for chosen in itertools.product((4, 20, 36, 48), repeat=3):
        for num_pages in (12, 15):
            at = PrefillNode(num_pages=num_pages, chunk=8, rules=OFF, long_prompts=LongPromptLimits(8, 0.5, max_begun))
            for index, length in enumerate(chosen):
                at.submit(f"{index}", length)
            num_steps = 0
            while len(at.done) < 3:
                assert at.step(), f"{chosen} on {num_pages} pages: nothing is computed, and prompts wait"
                num_steps += 1
            assert num_steps <= sum(-(-length // 4) for length in chosen)


@pytest.mark.parametrize("seed", range(6))
def test_prompts_with_granted_pages_never_wait_for_others(seed: int) -> None:
    """The transfers of prompts without grants never end here; each prompt with granted pages does."""
    random = Random(seed)
    at = PrefillNode(num_pages=24, slots=3, chunk=8, rules=OFF, long_prompts=LongPromptLimits(8, 0.5, 2))
    for index in range(6):
        at.submit(f"other {index}", random.randint(4, 60))
    for _ in range(random.randint(0, 12)):
        at.step(is_sent=False)
    granted = [f"granted {index}" for index in range(3)]
    for rid in granted:
        at.granted.add((rid, 0))
        at.submit(rid, random.randint(9, 90))
    for _ in range(300):
        at.step(is_sent=False)
        for rid in granted:
            if rid in at.done and (rid, 0) in at.scheduler.requests:
                at.scheduler.release((rid, 0))
    assert set(granted) <= set(at.done)
