"""Which pages a token sees within a window, and which a request holds if every layer has a window. Pure.

The token at position n sees positions ``n - tokens + 1`` to n; what is before them is never read again. So such a
request needs only the pages of its last tokens, however long it gets. Its page table is a ring: a page that lies
outside the window of all tokens still to be computed takes the tokens of the next page. The table keeps an entry for
every page from the first token on, as for other models, so that executor and attention know nothing of rings.

A page in the radix cache may serve other requests, too, and is never used again in this way. A request that has used
a page again, or was received or admitted as a ring, has *wrapped*: it is not known to be a whole prefix, and nothing of
it enters the cache.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from common.cache.tree_node import Match
from common.request import Request

UNBOUNDED = sys.maxsize


@dataclass(frozen=True, slots=True)
class KVWindow:
    """The window of a model on one node.

    Attributes:
        tokens: length of the longest window of any layer, in tokens: a token sees itself and ``tokens - 1`` before it.
            ``UNBOUNDED``: every token before it.
        chunk_tokens: most tokens of one request that a step computes.
        cached_tokens: longer prompts are computed or received in a ring at once, and do not use the cache.
    """

    page_size: int
    tokens: int = UNBOUNDED
    chunk_tokens: int = UNBOUNDED
    cached_tokens: int = UNBOUNDED

    @classmethod
    def of_prefill(cls, page_size: int, tokens: int | None, chunk_tokens: int | None) -> "KVWindow":
        """On a prefill node prompts of any length are cached, as long as there is room for them."""
        return cls(page_size, max(tokens or UNBOUNDED, 2), chunk_tokens or UNBOUNDED)

    @classmethod
    def of_decode(cls, page_size: int, tokens: int | None, chunk_tokens: int | None, num_pages: int) -> "KVWindow":
        """On a decode node only prompts within the window are cached.

        They keep their cached pages beside the ring that they grow into. A pool of ``num_pages`` that has room for a
        ring, but not for both, caches nothing, so that requests may be longer than the pool.
        """
        if tokens is None:
            return cls(page_size)
        tokens = max(tokens, 2)
        kv_window = cls(page_size, tokens, chunk_tokens or UNBOUNDED, tokens - 1)
        uncached = replace(kv_window, cached_tokens=0)
        return uncached if uncached.max_held <= num_pages < kv_window.max_held else kv_window

    @property
    def is_bounded(self) -> bool:
        return self.tokens < UNBOUNDED

    def is_cached(self, num_tokens: int) -> bool:
        """Whether a prompt of ``num_tokens`` tokens is matched in the cache and enters it."""
        return num_tokens <= self.cached_tokens

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def first_seen(self, num_tokens: int) -> int:
        """Index of the first page with a token that the token after ``num_tokens`` tokens sees."""
        return max(0, (num_tokens - self.tokens + 1) // self.page_size)

    @property
    def num_seen(self) -> int:
        """Pages before its own with tokens that the first token of a page sees."""
        return -(-(self.tokens - 1) // self.page_size)

    def first_held(self, num_tokens: int) -> int:
        """Index of the first page that a request holds when it goes on after ``num_tokens`` tokens.

        The request keeps at least one full page, if it has one. The entries of its table for pages outside the window
        then name pages in which every place is written.
        """
        if self.is_cached(num_tokens):
            return 0
        return max(0, min(self.first_seen(num_tokens), num_tokens // self.page_size - 1))

    def max_span(self, num_new: int) -> int:
        """The most pages that hold a chunk of ``num_new`` tokens and the earlier tokens that its first token sees."""
        if not self.is_bounded or num_new == UNBOUNDED:
            return UNBOUNDED
        return (self.tokens - 1 + num_new + self.page_size - 2) // self.page_size + 1

    def pages_to_compute(self, num_tokens: int) -> int:
        """Pages for a prompt that is computed in a ring."""
        return min(self.num_pages(num_tokens), self.max_span(self.chunk_tokens))

    def prefers_ring(self, num_tokens: int, match: Match, num_pages: int) -> bool:
        """Whether a prompt that finds no room with the cache is computed in a ring instead, if there is room for that.

        A ring shares no pages with other requests. It is preferred if it takes fewer pages than the prompt lacks
        in the cache, or if the pool of ``num_pages`` can never hold the prompt.
        """
        num_all = self.num_pages(num_tokens)
        return self.pages_to_compute(num_tokens) < num_all - len(match.pages) or num_all > num_pages

    @property
    def max_held(self) -> int:
        """The most pages that one request holds if there are not enough for all of its tokens."""
        if not self.is_bounded:
            return UNBOUNDED
        num_cached = 0 if self.cached_tokens == UNBOUNDED else self.cached_tokens // self.page_size
        return max(self.max_span(self.chunk_tokens), num_cached + self.max_span(1))

    def max_tokens(self, num_pages: int) -> int:
        """Tokens of the longest request that a pool of ``num_pages`` pages can serve."""
        return UNBOUNDED if self.max_held <= num_pages else num_pages * self.page_size

    def max_pages(self, request: Request) -> int:
        """The number of entries in the request's page table at which it begins to use its own pages again."""
        if not self.is_bounded:
            return UNBOUNDED
        if request.own if request.is_wrapped else request.num_computed >= request.num_decodable:
            num_kept = len(request.pages) - len(request.own)
        else:  # its pages are still to be received, or computed and cached
            num_kept = self._num_kept(request.num_tokens)
        return num_kept + self.max_span(1)

    def room_left(self, request: Request) -> int:
        """Tokens by which the request can grow before it takes no further pages."""
        return max(0, self.max_pages(request) * self.page_size - request.num_tokens)

    def _num_kept(self, num_tokens: int) -> int:
        """Entries of the page table of ``num_tokens`` tokens that are cached, or else outside the window."""
        return num_tokens // self.page_size if self.is_cached(num_tokens) else self.first_held(num_tokens)


def ring_table(ring: Sequence[int], num_pages: int) -> list[int]:
    """The page table of ``num_pages`` entries that repeats the pages of ``ring`` in order."""
    return list(islice(cycle(ring), num_pages))


def reuse_page(kv_window: KVWindow, request: Request) -> bool:
    """Append the request's oldest own page to its table if no further token sees it. False: the request has none."""
    if not kv_window.is_bounded or not request.own:
        return False
    end = len(request.pages) - len(request.own) + 1  # of the page, in pages
    if end > kv_window.first_seen(request.num_scheduled):
        return False
    page = request.own.pop(0)
    request.own.append(page)
    request.pages.append(page)
    request.is_wrapped = True
    return True
