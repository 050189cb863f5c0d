"""Random histories of the prefix cache, compared with a dictionary from prefixes of whole pages to pages."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.examples import examples

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.tree_node import Match, Pending, PrefixWatch, TreeNode, pack

PAGE = 2
PAGES = st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)])
PREFIXES = st.lists(PAGES, min_size=1, max_size=7)
SALTS = st.sampled_from(["", "salt"])
Key = tuple[str, tuple[tuple[int, int], ...]]


class RadixMachine(RuleBasedStateMachine):
    """Random events, compared with a dictionary from each cached prefix to its last page."""

    @initialize(num_pages=st.integers(4, 40))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.allocator, PAGE)
        self.ready: dict[Key, int] = {}
        self.used_at: dict[Key, int] = {}
        self.time = 0
        self.locks: list[tuple[TreeNode, Key]] = []
        self.pending: list[tuple[Pending, list[Key], list[int]]] = []
        self.watches: list[tuple[PrefixWatch, list[Key]]] = []

    # ---- the model ----

    def keys(self, salt: str, prefix: list[tuple[int, int]]) -> list[Key]:
        return [(salt, tuple(prefix[: n + 1])) for n in range(len(prefix))]

    def find(self, keys: list[Key]) -> tuple[int, Pending | None]:
        """Mark ready pages at the start as used; return their number and the pending handle that follows."""
        self.time += 1
        count = 0
        while count < len(keys) and keys[count] in self.ready:
            self.used_at[keys[count]] = self.time
            count += 1
        for handle, waiting, _ in self.pending:
            if count < len(keys) and keys[count] in waiting:
                return count, handle
        return count, None

    def kept(self) -> set[Key]:
        """Prefixes that locks or transfers protect."""
        ends = [key for _, key in self.locks] + [keys[0] for _, keys, _ in self.pending]
        return {(salt, prefix[:n]) for salt, prefix in ends for n in range(1, len(prefix) + 1)}

    def num_evictable(self) -> int:
        return len(set(self.ready) - self.kept())

    def tokens(self, key: Key) -> list[int]:
        return [token for page in key[1] for token in page]

    # ---- events ----

    @rule(salt=SALTS, prefix=PREFIXES, tail=st.integers(0, PAGE - 1), is_locked=st.booleans(), is_packed=st.booleans())
    def match(self, salt: str, prefix: list[tuple[int, int]], tail: int, is_locked: bool, is_packed: bool) -> None:
        keys = self.keys(salt, prefix)
        count, handle = self.find(keys)
        tokens = self.tokens(keys[-1]) + [0] * tail
        result: Match = self.cache.match(pack(tokens) if is_packed else tokens, salt)
        assert result.pages == [self.ready[key] for key in keys[:count]]
        assert result.num_tokens == count * PAGE
        assert (result.pending is None) == (handle is None)
        if result.pending is not None:
            assert result.pending.pending is handle
            common = next(keys for other, keys, _ in self.pending if other is handle)
            assert len(result.pending.pages) <= len(set(common) & set(keys))
        if is_locked and count:
            self.cache.lock(result.node)
            self.locks.append((result.node, keys[count - 1]))

    @rule(salt=SALTS, prefix=PREFIXES, is_locked=st.booleans())
    def insert(self, salt: str, prefix: list[tuple[int, int]], is_locked: bool) -> None:
        pages = self.allocator.alloc(len(prefix), Owner.REQUEST)
        if pages is None:
            return
        keys = self.keys(salt, prefix)
        count, handle = self.find(keys)
        first = len(keys) if handle else count
        inserted = self.cache.insert(self.tokens(keys[-1]), pages, salt)
        assert (inserted.first_adopted, inserted.num_adopted) == (first, len(keys) - first)
        for key, page in zip(keys[first:], pages[first:], strict=True):
            self.ready[key] = page
            self.used_at[key] = self.time
        self.allocator.free(pages[:first], Owner.REQUEST)
        deepest = count if handle else len(keys)
        if is_locked and deepest:
            self.cache.lock(inserted.node)
            self.locks.append((inserted.node, keys[deepest - 1]))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, key = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        assert pack(self.tokens(key)) == b"".join(part.key for part in node.path())
        self.cache.unlock(node)

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        expected = min(count, self.num_evictable())
        kept = self.kept()
        assert self.cache.evict(count) == expected
        there = {page for node in self.cache.nodes() for page in node.pages}
        gone = [key for key, page in self.ready.items() if page not in there]
        assert len(gone) == expected
        assert kept.isdisjoint(gone)
        latest = max((self.used_at[key] for key in gone), default=0)
        for key in gone:
            del self.ready[key]
        inner = {(salt, prefix[:-1]) for salt, prefix in self.ready}
        for key in set(self.ready) - kept - inner:
            assert self.used_at[key] >= latest, "a leaf was kept although an evicted one was used later"

    @rule(salt=SALTS, prefix=PREFIXES)
    def announce(self, salt: str, prefix: list[tuple[int, int]]) -> None:
        keys = self.keys(salt, prefix)
        count, handle = self.find(keys)
        self.cache.match(self.tokens(keys[-1]), salt)
        if handle is not None or count == len(keys):
            return
        pages = self.allocator.alloc(len(keys) - count, Owner.GRANT)
        if pages is not None:
            self.find(keys)
            handle = self.cache.insert_pending(self.tokens(keys[-1]), pages, salt)
            self.pending.append((handle, keys[count:], pages))

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), is_locked=st.booleans())
    def make_ready(self, data: st.DataObject, is_locked: bool) -> None:
        handle, keys, pages = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        node = self.cache.make_ready(handle)
        self.ready.update(zip(keys, pages, strict=True))
        salt, prefix = keys[-1]
        self.find(self.keys(salt, list(prefix)))
        if is_locked:
            self.cache.lock(node)
            self.locks.append((node, keys[-1]))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def drop_pending(self, data: st.DataObject) -> None:
        handle, keys, pages = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        num_arrived = data.draw(st.integers(0, len(pages)))
        assert self.cache.drop_pending(handle, num_arrived) == pages[num_arrived:]
        self.allocator.free(pages[num_arrived:], Owner.GRANT)
        if num_arrived:
            self.ready.update(zip(keys[:num_arrived], pages[:num_arrived], strict=True))
            salt, prefix = keys[num_arrived - 1]
            self.find(self.keys(salt, list(prefix)))

    @rule(salt=SALTS, prefix=PREFIXES, tail=st.integers(0, PAGE - 1))
    def watch(self, salt: str, prefix: list[tuple[int, int]], tail: int) -> None:
        keys = self.keys(salt, prefix)
        self.watches.append((self.cache.watch(self.tokens(keys[-1]) + [0] * tail, salt), keys))

    @precondition(lambda self: self.watches)
    @rule(data=st.data())
    def unwatch(self, data: st.DataObject) -> None:
        watch, _ = self.watches.pop(data.draw(st.integers(0, len(self.watches) - 1)))
        self.cache.unwatch(watch)

    @rule()
    def clear(self) -> None:
        expected, kept = self.num_evictable(), self.kept()
        assert self.cache.clear() == expected
        self.ready = {key: page for key, page in self.ready.items() if key in kept}

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        self.allocator.check()
        assert self.cache.num_pages == len(self.ready) == self.allocator.count(Owner.RADIX)
        assert self.cache.num_evictable_pages == self.num_evictable()
        assert self.allocator.count(Owner.GRANT) == sum(len(pages) for _, _, pages in self.pending)
        for watch, keys in self.watches:
            cached = [key in self.ready for key in keys]
            assert watch.num_tokens == PAGE * (cached.index(False) if False in cached else len(keys))

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for node, _ in self.locks:
            self.cache.unlock(node)
        for handle, _, pages in self.pending:
            self.cache.drop_pending(handle)
            self.allocator.free(pages, Owner.GRANT)
        self.cache.clear()
        assert all(watch.num_tokens == 0 for watch, _ in self.watches)
        for watch, _ in self.watches:
            self.cache.unwatch(watch)
        self.cache.check()
        assert not self.cache._roots
        assert self.allocator.num_free == self.allocator.num_pages


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)


class LongerRadixMachine(RadixMachine):
    """The same with more and longer histories."""


TestLongerRadixMachine = pytest.mark.slow(LongerRadixMachine.TestCase)
TestLongerRadixMachine.settings = settings(max_examples=250, stateful_step_count=100, deadline=None)
