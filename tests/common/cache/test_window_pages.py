"""Window pages beside full pages: which prefixes are usable, what requests hold, and what is evicted first."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import cache_computed, release
from common.cache.tree_node import Pending
from common.cache.window_pages import LayerGroups, WindowPages
from common.errors import InvariantError
from common.request import Request
from common.sampling_params import SamplingParams
from common.step_plan import PageDelta

PAGE = 4
#: A token sees 10 tokens before it: the last 3 pages of a prefix, and at most 4 pages with its own.
WINDOW = 11
GROUPS = LayerGroups((2, 5), (0, 1, 3, 4), WINDOW)


class Node:
    """An allocator and a cache with window pages; requests are computed by hand."""

    def __init__(self, num_pages: int = 40, num_window_pages: int = 12, chunk: int = 8) -> None:
        self.windows = WindowPages(GROUPS, num_pages, num_window_pages, page_size=PAGE, chunk_tokens=chunk)
        self.allocator = PageAllocator(num_pages, self.windows)
        self.cache = RadixCache(self.allocator, PAGE)
        self.requests: list[Request] = []

    def begin(self, rid: str, length: int, first: int = 0, new: int = 30) -> Request | None:
        request = Request(rid, 0, tuple(range(first, first + length)), SamplingParams(max_new_tokens=new))
        match = self.cache.match(request.prompt[:-1])
        count = self.windows.needs(request, decodes=True)
        num_new = -(-length // PAGE) - len(match.pages)
        self.cache.lock(match.node)
        self.cache.evict(num_new - self.allocator.num_free)
        own = self.allocator.alloc(num_new, Owner.REQUEST) if count <= self.windows.num_unreserved else None
        if own is None:
            self.cache.unlock(match.node)
            return None
        request.pages, request.own, request.node = match.pages + own, own, match.node
        request.num_computed = request.num_cached = match.num_tokens
        self.windows.admit(request, match.num_tokens, count)
        self.requests.append(request)
        return request

    def compute(self, request: Request, num_tokens: int) -> None:
        """Compute the next tokens of a prompt."""
        end = min(request.num_computed + num_tokens, len(request.prompt))
        self.windows.advance(request, request.num_computed, end)
        request.num_computed = end
        cache_computed(self.cache, request)

    def grow(self, request: Request) -> None:
        """Compute one more token of the output."""
        if request.num_computed == len(request.pages) * PAGE:
            self.cache.evict(1 - self.allocator.num_free)
            page = self.allocator.alloc(1, Owner.REQUEST)
            if page is None:
                return
            request.pages += page
            request.own += page
            self.windows.advance(request, request.num_computed, request.num_computed + 1)
        request.output.append(1000 + len(request.output))
        request.num_computed += 1

    def whole(self, rid: str, length: int, first: int = 0) -> Request:
        request = self.begin(rid, length, first)
        assert request is not None
        while request.num_computed < length:
            self.compute(request, 8)
        return request

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        release(self.cache, self.allocator, request)

    def check(self) -> None:
        self.allocator.check()
        self.cache.check()
        self.windows.check_requests(self.requests)


def test_slabs_have_the_most_layers_that_divide_both_groups() -> None:
    assert (GROUPS.slab_layers, GROUPS.full_slabs, GROUPS.window_slabs) == (2, 1, 2)
    odd = LayerGroups((3, 7), (0, 1, 2, 4, 5, 6, 8), 5)
    assert (odd.slab_layers, odd.full_slabs, odd.window_slabs, odd.num_slabs(10, 4)) == (1, 2, 7, 48)


def test_a_long_prompt_holds_the_window_and_a_chunk_and_then_the_window() -> None:
    node = Node()
    request = node.begin("a", 100)
    assert request is not None
    most = 0
    while request.num_computed < 100:
        node.compute(request, 8)
        most = max(most, request.window_end - request.window_first)
        node.check()
    assert most == 5 <= request.window_reserved == 6
    assert (request.window_first, request.window_end) == (21, 25), "token 96 sees token 86, on page 21"
    node.windows.settle(request, 100, decodes=False)
    assert (request.window_first, request.window_end) == (22, 25), "token 100 sees token 90, on page 22"
    assert node.windows.num_reserved == 3
    for _ in range(40):
        if request.window_reserved < 4:
            node.windows.num_reserved += 4 - request.window_reserved
            request.window_reserved = 4
        node.grow(request)
        assert request.window_end - request.window_first <= 4
        node.check()


def test_a_prefix_is_usable_where_the_pages_of_its_last_window_are_there() -> None:
    node = Node(num_window_pages=12)
    node.end(node.whole("a", 48))
    tokens = tuple(range(48))
    assert len(node.cache.match(tokens).pages) == 12, "all 12 pages have window pages"
    other = node.whole("b", 30, first=500)  # takes those that were left behind first, the oldest before others
    missing = [
        index for index, page in enumerate(node.cache.match_all(tokens).pages) if node.windows._page_of[page] < 0
    ]
    assert missing == list(range(7))
    assert len(node.cache.match(tokens).pages) == 12, "its last 3 pages are there"
    assert len(node.cache.match(tokens[:40]).pages) == 10
    assert len(node.cache.match(tokens[:36]).pages) == 0, "only pages 7 and 8 are there"
    node.end(other)
    node.check()


def test_a_request_gives_window_pages_to_the_cached_prefix_that_lacks_them() -> None:
    node = Node()
    node.end(node.whole("a", 40))
    for page in node.cache.match_all(tuple(range(40))).pages:
        if node.windows._page_of[page] >= 0:
            node.windows._put(node.windows._unmap(page), 0)
            node.windows.num_idle -= 1
    assert node.cache.match(tuple(range(40))).pages == []
    again = node.whole("b", 41)
    assert again.num_cached == 0
    assert len(again.own) == 11, "nothing of it is cached while the cache has the same tokens without window pages"
    node.end(again)
    node.check()
    assert len(node.cache.match(tuple(range(40))).pages) == 10
    assert node.allocator.count(Owner.RADIX) == 10, "the duplicates are free"


def test_admission_counts_what_requests_can_hold() -> None:
    node = Node(num_pages=80, num_window_pages=13)
    assert node.begin("a", 100) is not None
    assert node.begin("b", 100, first=500) is not None
    assert node.windows.num_unreserved == 1
    assert node.begin("c", 100, first=800) is None
    assert node.begin("d", 3, first=900, new=1) is not None, "it holds one page at most"
    assert node.windows.num_unreserved == 0
    node.check()


def test_the_executor_learns_of_each_window_page_once() -> None:
    node = Node()
    request = node.begin("a", 60)
    assert request is not None
    request.slot = 3
    node.compute(request, 8)
    mapped = node.windows._page_of
    assert node.windows.deltas([request], []) == (PageDelta(3, 0, tuple(mapped[page] for page in request.pages[:2])),)
    assert node.windows.deltas([], [request]) == ()
    node.compute(request, 8)
    known = tuple(mapped[page] for page in request.pages[2:4])
    assert node.windows.deltas([], [request]) == (PageDelta(3, 2, known),)
    for _ in range(3):
        node.compute(request, 8)
    known = tuple(mapped[page] for page in request.pages[5:10])
    assert request.window_first == 5
    assert node.windows.deltas([request], [request]) == (PageDelta(3, 0, (known[0],) * 5 + known),)


def test_a_transfer_moves_window_pages_of_the_window_only() -> None:
    node = Node()
    request = node.whole("a", 50)
    node.windows.settle(request, 50, decodes=False)
    first, num_pages = (50 - WINDOW + 1) // PAGE, 13
    assert first == 10
    slabs = node.windows.slabs(request.pages, 0, 50)
    assert len(slabs) == num_pages + 2 * (num_pages - first) == node.windows.num_slabs(num_pages, 50)
    assert len(set(slabs)) == len(slabs)
    assert max(slabs) < GROUPS.num_slabs(40, 12)
    assert node.windows.pages_of(slabs) == request.pages
    assert node.windows.transfer_length(50) == len(slabs) * PAGE
    assert node.windows.slabs(request.pages[11:], 11, 50) == slabs[node.windows.num_slabs(11, 50) :]
    assert node.windows.pages_of(slabs[:-1]) == request.pages[:-1], "a page is complete with its last slab"


def test_pages_of_a_failed_transfer_stay_until_no_write_can_reach_them() -> None:
    node = Node(num_window_pages=6)
    request = Request("a", 0, tuple(range(30)), SamplingParams(max_new_tokens=30))
    assert node.windows.reserve_grant(request, [], 30, last_step=0)
    pages = node.allocator.alloc(8, Owner.GRANT)
    assert pages is not None
    request.pages = pages
    node.windows.take_grant(request)
    node.windows.check_requests([request])
    assert (request.window_first, request.window_end, request.window_reserved) == (5, 8, 4)
    node.windows.withdraw_grant(request, 6)
    node.allocator.free(pages[:6], Owner.GRANT)
    node.allocator.move(pages[6:], Owner.GRANT, Owner.QUARANTINE)
    node.windows.check_requests([])
    assert node.windows.num_unreserved == 4, "two pages may still be written"
    node.allocator.free(pages[6:], Owner.QUARANTINE)
    assert node.windows.num_unreserved == 6
    node.check()


def grant(node: Node, prompt: tuple[int, ...]) -> tuple[Request, Pending]:
    """Reserve all pages of a prompt for a transfer; whole pages are pending in the cache."""
    request = Request(f"of {len(prompt)}", 0, prompt, SamplingParams(max_new_tokens=30))
    assert node.windows.reserve_grant(request, [], len(prompt), last_step=0)
    request.pages = node.allocator.alloc(-(-len(prompt) // PAGE), Owner.GRANT) or []
    node.windows.take_grant(request)
    num_whole = len(prompt) // PAGE
    return request, node.cache.insert_pending(prompt[: num_whole * PAGE], request.pages[:num_whole])


@pytest.mark.parametrize(("num_shared", "is_usable"), [(40, True), (36, False), (20, False)])
def test_only_a_prefix_that_will_have_its_window_is_pending(num_shared: int, is_usable: bool) -> None:
    node = Node()
    prompt = tuple(range(40))
    _, pending = grant(node, prompt)
    mine = (*prompt[:num_shared], *range(900, 910))
    assert (node.cache.match(mine).pending is not None) == is_usable
    assert node.cache.num_pending(mine) == (10 if is_usable else 0)
    node.cache.make_ready(pending)
    assert len(node.cache.match(mine).pages) == (10 if is_usable else 0)


def test_a_prefix_is_pending_even_if_cached_pages_before_it_cannot_be_used() -> None:
    node = Node()
    node.end(node.whole("a", 16))
    tokens = tuple(range(48))
    match = node.cache.match(tokens)
    assert len(match.pages) == 4
    request = Request("b", 0, tokens, SamplingParams(max_new_tokens=30))
    assert node.windows.reserve_grant(request, match.pages, 48, last_step=0)
    new = node.allocator.alloc(8, Owner.GRANT)
    assert new is not None
    request.pages = match.pages + new
    node.windows.take_grant(request)
    pending = node.cache.insert_pending(tokens, new)
    for page in match.pages:
        node.windows._put(node.windows._unmap(page), 0)
        node.windows.num_idle -= 1
    found = node.cache.match(tokens)
    assert (found.pages, found.pending is not None, node.cache.num_pending(tokens)) == ([], True, 8)
    node.cache.make_ready(pending)
    assert len(node.cache.match(tokens).pages) == 12


def test_a_peer_gets_no_page_that_a_step_in_flight_may_use() -> None:
    node = Node(num_window_pages=6)
    node.allocator.begin_step(1)
    node.end(node.whole("a", 24))
    request = Request("b", 0, tuple(range(500, 530)), SamplingParams(max_new_tokens=30))
    assert not node.windows.reserve_grant(request, [], 30, last_step=node.allocator.step_in_flight)
    assert node.windows.num_reserved == 0
    node.allocator.end_step(1)
    assert node.windows.reserve_grant(request, [], 30, last_step=node.allocator.step_in_flight)
    node.windows.check()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_step_leaves_free_pages_to_a_grant_that_waits_until_its_request_is_aborted(is_aborted: bool) -> None:
    node = Node(num_window_pages=8)
    node.allocator.begin_step(1)
    node.end(node.whole("a", 32))
    waiting = Request("b", 0, tuple(range(500, 530)), SamplingParams(max_new_tokens=30))
    assert not node.windows.reserve_grant(waiting, [], 30, last_step=node.allocator.step_in_flight)
    if is_aborted:
        release(node.cache, node.allocator, waiting)
    node.allocator.end_step(1)
    num_free, num_idle = node.windows.num_free, node.windows.num_idle
    node.whole("c", PAGE, first=900)
    assert (num_free - node.windows.num_free, num_idle - node.windows.num_idle) == (is_aborted, not is_aborted)
    node.check()


@given(st.integers(2, 20), st.integers(1, 6), st.lists(st.booleans(), max_size=24))
def test_the_longest_usable_prefix_is_found(window: int, page_size: int, present: list[bool]) -> None:
    groups = LayerGroups((0,), (1,), window)
    windows = WindowPages(groups, 24, 24, page_size=page_size)
    for page, is_present in enumerate(present):
        windows._page_of[page] = page if is_present else -1

    def is_usable(num_pages: int) -> bool:
        return all(present[windows.kv_window.first_seen(num_pages * page_size) : num_pages])

    longest = max(count for count in range(len(present) + 1) if is_usable(count))
    assert windows.num_usable(range(len(present))) == longest


@pytest.mark.parametrize("seed", range(20))
def test_books_balance_in_random_histories(seed: int) -> None:
    random = Random(seed)
    node = Node(random.randint(20, 50), random.randint(6, 14), chunk=8)
    step = 0
    for number in range(250):
        action = random.choice(["begin", "compute", "compute", "compute", "grow", "end", "step"])
        alive = random.choice(node.requests) if node.requests else None
        if action == "begin":
            node.begin(f"r{number}", random.randint(1, 70), first=100 * random.randint(0, 3))
        elif action == "step":
            if node.allocator.step_in_flight:
                node.allocator.end_step(step)
            else:
                step += 1
                node.allocator.begin_step(step)
        elif alive is not None and action == "end":
            node.end(alive)
        elif alive is not None and alive.num_computed < len(alive.prompt):
            node.compute(alive, random.randint(1, 8))
        elif alive is not None:
            node.grow(alive)
        node.check()
    for request in list(node.requests):
        node.end(request)
    node.check()
    assert node.windows.num_reserved == 0


def test_the_check_finds_a_lost_page() -> None:
    node = Node()
    node.whole("a", 20)
    node.windows._free.pop()
    with pytest.raises(InvariantError, match="lost"):
        node.windows.check()
