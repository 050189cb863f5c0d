"""An engine without a model whose tokens reveal every wrong page.

The "KV" of a position is a running hash over all tokens up to it. The next token is a function of the sum of all
hashes, read back from the pages as attention would. A page that is stale, overwritten, misplaced or released too soon
changes every later token, and the output no longer equals ``expected_output``.

With a window, hash and token depend on the positions that the window has, and on no others.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.cache.page_layout import PageLayout
from common.cache.window_pages import LayerGroups
from common.step_plan import StepPlan, StepResult

VOCAB_SIZE = 50_000


def mix(state: int, token: int) -> int:
    """Return the running hash after one more token; 32 bits, never zero."""
    value = (state * 0x9E3779B1 + token * 0x85EBCA77 + 0x165667B1) & 0xFFFFFFFF
    value ^= value >> 15
    return value * 0xC2B2AE3D & 0xFFFFFFFF | 1


def mix_window(seen: NDArray[np.uint32], token: int) -> int:
    """Return the hash of a token that sees the tokens with these hashes, and itself."""
    return mix(int(seen.sum(dtype=np.uint64)) & 0xFFFFFFFF, token)


def expected_output(prompt: Sequence[int], num_tokens: int, window: int | None = None) -> tuple[int, ...]:
    """Return the tokens that the engine must produce after ``prompt``."""
    if window is not None:
        return _expected_within(window, prompt, num_tokens)
    state = total = 0
    for token in prompt:
        state = mix(state, token)
        total += state
    output = []
    for _ in range(num_tokens):
        output.append(total % VOCAB_SIZE)
        state = mix(state, output[-1])
        total += state
    return tuple(output)


def _expected_within(window: int, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    tokens, hashes = list(prompt), np.zeros(len(prompt) + num_tokens, np.uint32)
    for position in range(len(hashes)):
        if position >= len(prompt):
            seen = hashes[max(position - window, 0) : position]
            tokens.append(int(seen.sum(dtype=np.uint64)) % VOCAB_SIZE)
        hashes[position] = mix_window(hashes[max(position - window + 1, 0) : position], tokens[position])
    return tuple(tokens[len(prompt) :])


def expected_of_both(prompt: Sequence[int], num_tokens: int, window: int) -> tuple[int, ...]:
    """The tokens of an engine with a layer that sees all tokens and one with a window."""
    tokens, size = list(prompt), len(prompt) + num_tokens
    full, windowed = np.zeros(size, np.uint32), np.zeros(size, np.uint32)
    for position in range(size):
        if position >= len(prompt):
            tokens.append(token_of(full[:position], windowed[max(position - window, 0) : position]))
        full[position] = mix(int(full[position - 1]) if position else 0, tokens[position])
        windowed[position] = mix_window(windowed[max(position - window + 1, 0) : position], tokens[position])
    return tuple(tokens[len(prompt) :])


def token_of(*seen: NDArray[np.uint32]) -> int:
    """The token that an engine samples whose layers see tokens with these hashes."""
    return sum(int(hashes.sum(dtype=np.uint64)) for hashes in seen) % VOCAB_SIZE


#: Of the engine with ``num_window_pages``: one layer that sees all tokens, one with a window.
def both_groups(window: int) -> LayerGroups:
    return LayerGroups((0,), (1,), window)


class FakePool:
    """A ``PageStore`` with 4 bytes of hash per token as the key, and 4 unused bytes as the value."""

    fd = -1
    is_mapped = is_in_place = True
    device_pages = None

    def __init__(self, num_pages: int, page_size: int, groups: LayerGroups | None = None) -> None:
        self.layout = PageLayout(1, 1, 1, page_size, "float32")
        if groups is not None:
            self.layout = groups.layout_of(self.layout)
        self.num_pages = num_pages
        self.bytes = bytearray(self.layout.pool_bytes(num_pages))
        self.memory = memoryview(self.bytes)
        self.keys = np.frombuffer(self.bytes, np.uint32).reshape(num_pages, 2, page_size)[:, 0]

    def export_page(self, page: int, into: memoryview) -> None:
        size = self.layout.page_bytes
        into[:] = self.memory[page * size : (page + 1) * size]

    def landed(self, pages: Sequence[int]) -> None:
        pass


class FakeExecutor:
    """Runs plans over a ``FakePool`` and asserts that each plan is valid.

    Args:
        num_window_pages: pages that a second layer has, which attends within ``window``; the first sees all tokens.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int,
        window: int | None = None,
        num_window_pages: int | None = None,
    ) -> None:
        self._window = window
        self._num_pages, self._num_window_pages = num_pages, num_window_pages
        groups = None if window is None or num_window_pages is None else both_groups(window)
        self.pool = FakePool(num_pages + (num_window_pages or 0), page_size, groups)
        self._page_size = page_size
        self._tables: dict[int, list[int]] = {}
        self._window_tables: dict[int, list[int]] = {}
        self._last: dict[int, int | None] = {}
        self._num_slots = num_slots

    def run(self, plan: StepPlan) -> StepResult:
        for admit in plan.admits:
            assert 0 <= admit.slot < self._num_slots
            self._tables[admit.slot] = []
            self._window_tables[admit.slot] = []
            self._last[admit.slot] = admit.last_token
        for slot, first, pages in plan.pages:
            assert first <= len(self._tables[slot])
            self._tables[slot][first : first + len(pages)] = pages
        for slot, first, pages in plan.windows:
            assert self._num_window_pages is not None and all(0 <= page < self._num_window_pages for page in pages)
            assert first <= len(self._window_tables[slot])
            self._window_tables[slot][first : first + len(pages)] = pages
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot has two rows"
        tokens = [self._extend(row.slot, row.start, row.tokens, row.sample) for row in plan.rows]
        return StepResult(plan.step, tuple(token for token in tokens if token is not None))

    def _extend(self, slot: int, start: int, tokens: tuple[int, ...] | None, sample: bool) -> int | None:
        if tokens is None:
            last = self._last[slot]
            assert last is not None
            tokens = (last,)
        table = np.array(self._tables[slot])
        if self._window is not None and self._num_window_pages is not None:
            return self._extend_both(slot, self._window, start, tokens, sample)
        if self._window is not None:
            self._compute_within(self._window, table, start, tokens)
            if sample:
                end = start + len(tokens)
                seen = self._keys(table, end)[max(end - self._window, 0) :]
                self._last[slot] = int(seen.sum(dtype=np.uint64)) % VOCAB_SIZE
            return self._last[slot] if sample else None
        state = int(self._keys(table, start)[-1]) if start else 0
        for position, token in enumerate(tokens, start):
            state = mix(state, token)
            self.pool.keys[table[position // self._page_size], position % self._page_size] = state
        if not sample:
            return None
        self._last[slot] = int(self._keys(table, start + len(tokens)).sum(dtype=np.uint64)) % VOCAB_SIZE
        return self._last[slot]

    def _extend_both(self, slot: int, window: int, start: int, tokens: Sequence[int], sample: bool) -> int | None:
        table, end = np.array(self._tables[slot]), start + len(tokens)
        windows = np.array(self._window_tables[slot]) + self._num_pages
        assert min(len(table), len(windows)) * self._page_size >= end, "a row without a page"
        state = int(self._keys(table, start)[-1]) if start else 0
        for position, token in enumerate(tokens, start):
            state = mix(state, token)
            self.pool.keys[table[position // self._page_size], position % self._page_size] = state
        self._compute_within(window, windows, start, tokens)
        if not sample:
            return None
        self._last[slot] = token_of(self._keys(table, end), self._keys(windows, end)[max(end - window, 0) :])
        return self._last[slot]

    def _compute_within(self, window: int, table: NDArray[np.int64], start: int, tokens: Sequence[int]) -> None:
        """Compute the hashes of new tokens. As in an engine, all of their places are written before any is read."""
        places = np.arange(start, start + len(tokens))
        new = (table[places // self._page_size], places % self._page_size)
        self.pool.keys[new] = 0
        hashes = self._keys(table, start + len(tokens)).copy()
        for position, token in enumerate(tokens, start):
            hashes[position] = mix_window(hashes[max(position - window + 1, 0) : position], token)
        self.pool.keys[new] = hashes[start:]

    def _keys(self, table: NDArray[np.int64], num_tokens: int) -> NDArray[np.uint32]:
        return self.pool.keys[table].reshape(-1)[:num_tokens]

    def close(self) -> None:
        pass
