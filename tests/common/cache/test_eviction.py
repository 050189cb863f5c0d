"""The order of eviction by each policy of ``--radix-eviction-policy``."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling.adder_pool import Pool, request

from common.cache.eviction import RANKS, EvictionPolicy
from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import release
from common.config.node import NodeConfig
from common.errors import ConfigError
from common.scheduling.prefill_adder import AddResult

PAGE = 2


class Cache:
    """A cache of prompts; a number stands for a page of equal tokens."""

    def __init__(self, eviction: EvictionPolicy) -> None:
        self.allocator = PageAllocator(64)
        self.tree = RadixCache(self.allocator, PAGE, eviction=eviction)

    def insert(self, *pages: int, priority: int = 0) -> None:
        taken = self.allocator.alloc(len(pages), Owner.REQUEST)
        assert taken is not None
        first = self.tree.insert(self.tokens(*pages), taken, priority=priority).first_adopted
        self.allocator.free(taken[:first], Owner.REQUEST)

    def use(self, *pages: int) -> None:
        self.tree.count_use(self.tree.match(self.tokens(*pages)).node)

    def tokens(self, *pages: int) -> list[int]:
        return [page for page in pages for _ in range(PAGE)]

    def evicted(self, count: int) -> list[int]:
        """Evict ``count`` pages one by one and return the first pages of the nodes that disappear."""
        gone = []
        for _ in range(count):
            before = self.left()
            assert self.tree.evict(1) == 1
            self.tree.check()
            gone += [name for name in before if name not in self.left()]
        return gone

    def left(self) -> list[int]:
        return [node.key[0] for node in self.tree.nodes()]


def test_lru_evicts_the_least_recently_used() -> None:
    cache = Cache("lru")
    for name in (1, 2, 3):
        cache.insert(name)
    cache.use(1)
    assert cache.evicted(3) == [2, 3, 1]


def test_lfu_evicts_the_least_often_used_then_the_least_recently_used() -> None:
    cache = Cache("lfu")
    for name in (1, 2, 3):
        cache.insert(name)
    for name in (3, 3, 1, 2):
        cache.use(name)
    assert cache.evicted(3) == [1, 2, 3]


def test_lfu_counts_a_request_once_however_often_it_was_tried() -> None:
    pool = Pool(8)
    pool.cache = RadixCache(pool.allocator, pool.page_size, eviction="lfu")
    pool.cached(*range(100, 108))
    pool.cached(*range(200, 208))
    for _ in range(2):
        used = request(9, start=100)
        assert pool.adder().add_one_req(used) is AddResult.CONTINUE
        release(pool.cache, pool.allocator, used)
    waiting = request(12, start=200)
    for _ in range(5):
        assert pool.adder(total=4).add_one_req(waiting) is AddResult.NO_TOKEN
    pool.cache.evict(2)
    assert pool.cache.match(waiting.prompt).num_tokens == 0
    assert pool.cache.match(range(100, 108)).num_tokens == 8


def test_priority_evicts_the_least_urgent_then_the_least_recently_used() -> None:
    cache = Cache("priority")
    for name, priority in ((1, 5), (2, -5), (3, 5), (4, 0)):
        cache.insert(name, priority=priority)
    cache.use(1)
    assert cache.evicted(4) == [2, 4, 3, 1]


def test_a_prefix_has_the_highest_priority_of_its_inserts() -> None:
    cache = Cache("priority")
    cache.insert(1, priority=0)
    cache.insert(2, priority=1)
    cache.insert(1, priority=2)
    assert cache.evicted(2) == [2, 1]
    cache.insert(1, priority=0)
    cache.insert(1, 3, priority=9)  # ancestors get the same priority
    cache.insert(2, priority=5)
    assert cache.evicted(3) == [2, 3, 1]


def test_all_ancestors_get_the_priority_of_an_insert() -> None:
    cache = Cache("priority")
    for depth in (1, 2, 3):
        cache.insert(*range(1, depth + 1), priority=9 if depth == 3 else 0)
    assert cache.evicted(2) == [3, 2]
    cache.insert(7, priority=5)
    assert cache.evicted(2) == [7, 1]


def test_both_parts_of_a_split_node_keep_its_priority() -> None:
    cache = Cache("priority")
    cache.insert(1, 4, priority=9)
    cache.use(1, 5)
    assert cache.evicted(1) == [4]
    cache.insert(7, priority=5)
    assert cache.evicted(2) == [7, 1]


@settings(deadline=None)
@given(
    policy=st.sampled_from(list(RANKS)),
    events=st.lists(
        st.tuples(st.sampled_from(["insert", "use", "evict"]), st.integers(0, 7), st.integers(-2, 2)), max_size=40
    ),
)
def test_the_lowest_rank_is_evicted_first_in_any_history(
    policy: EvictionPolicy, events: list[tuple[str, int, int]]
) -> None:
    """The model is a dictionary of prompts of one page each."""
    cache = Cache(policy)
    known: dict[int, dict[str, int]] = {}
    for time, (event, name, priority) in enumerate(events):
        if event == "evict" and known:
            rank = {
                "lru": lambda facts: facts["used"],
                "lfu": lambda facts: (facts["uses"], facts["used"]),
                "priority": lambda facts: (facts["priority"], facts["used"]),
            }[policy]
            first = min(known, key=lambda name: rank(known[name]))
            assert cache.evicted(1) == [first]
            del known[first]
        elif event == "insert":
            cache.insert(name, priority=priority)
            facts = known.setdefault(name, {"uses": 0, "priority": priority})
            facts |= {"used": time, "priority": max(facts["priority"], priority)}
        elif event == "use":
            cache.use(name)
            if name in known:
                known[name] |= {"used": time, "uses": known[name]["uses"] + 1}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"radix_eviction_policy": "lfu", "disable_radix_cache": True}, "has no effect with --disable-radix-cache"),
        ({"radix_eviction_policy": "priority"}, "priority needs --enable-priority-scheduling"),
    ],
)
def test_an_eviction_policy_without_effect_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"--radix-eviction-policy {complaint}"):
        NodeConfig(**options)
