"""Pages of window layers, for models in which some layers attend within a window and others see all tokens. Pure.

Such a model can have two pools: one for the layers that see all tokens (*full* layers) and a smaller one for the layers
with a window. Requests, radix cache and transfers name full pages only. ``WindowPages`` knows which window page holds
the same tokens of the window layers, if there is one.

A request holds the window pages of the tokens that its next tokens see: a range of its page table, which moves on with
it. A window page that no request holds is *idle*. It stays with its full page, so that a later request may find a
prefix with it, until another request needs the memory. Pages that a request has left behind go first, since few other
requests end their prefix there, then those of requests that have ended; of either kind, the one idle for longest.

A cached prefix can be used to compute the next token if the window pages of its last tokens are there. To receive the
rest of a prompt from a peer, only window pages among the last tokens of the prompt are needed. Each request reserves
the most window pages that it can hold when it is admitted, so that it never waits for one later.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd

from common.cache.kv_window import UNBOUNDED, KVWindow
from common.cache.page_layout import PageLayout
from common.errors import invariant
from common.request import Request
from common.step_plan import PageDelta


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of a model that see all tokens, and those with a window.

    Transfers want pages of one size. So the memory of both pools is divided into *slabs* of the most layers that divide
    both groups. A full page is ``full_slabs`` adjacent slabs, a window page ``window_slabs``. Full pages come first.

    Attributes:
        full, windowed: indices of layers, ascending.
        window: tokens that a token sees, itself included, in the window layer that sees most.
    """

    full: tuple[int, ...]
    windowed: tuple[int, ...]
    window: int

    @property
    def slab_layers(self) -> int:
        return gcd(len(self.full), len(self.windowed))

    @property
    def full_slabs(self) -> int:
        return len(self.full) // self.slab_layers

    @property
    def window_slabs(self) -> int:
        return len(self.windowed) // self.slab_layers

    def num_slabs(self, num_pages: int, num_window_pages: int) -> int:
        return num_pages * self.full_slabs + num_window_pages * self.window_slabs

    def layout_of(self, layout: PageLayout) -> PageLayout:
        """The layout of a slab of pages of ``layout``, which has all layers."""
        return replace(
            layout,
            num_layers=self.slab_layers,
            window=self.window,
            full_slabs=self.full_slabs,
            window_slabs=self.window_slabs,
        )


#: Uncommitted steps to allow for when another one is planned: one more than overlap scheduling has.
MAX_UNCOMMITTED = 2


class WindowPages:
    """The window pages of one node, by full page.

    Args:
        num_full_pages, num_pages: sizes of the two pools.
        chunk_tokens: most tokens of one request that a step computes.

    Attributes:
        kv_window: of the window layer that sees most.
        num_reserved: pages that requests can hold.
        num_idle, num_lingering: pages that no request holds: with a full page, and freed while a step may use them.
    """

    def __init__(
        self, groups: LayerGroups, num_full_pages: int, num_pages: int, *, page_size: int, chunk_tokens: int = UNBOUNDED
    ) -> None:
        assert 0 < num_pages <= num_full_pages
        self.groups = groups
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_reserved = 0
        self.num_idle = 0
        self.num_lingering = 0
        self.kv_window = KVWindow(page_size, max(groups.window, 2), chunk_tokens)
        self._base = num_full_pages * groups.full_slabs
        self._page_of = [-1] * num_full_pages
        self._holds = [0] * num_full_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._lingering: deque[tuple[int, list[int]]] = deque()  # last step begun before the free, and the pages
        #: Full pages and when they became idle, left behind or not; entries may be out of date.
        self._left_behind: deque[tuple[int, int]] = deque()
        self._idle: deque[tuple[int, int]] = deque()
        self._idle_since = [0] * num_full_pages
        #: Full pages of transfers that failed, whose window pages are kept until no write can reach them.
        self._orphans: set[int] = set()
        self._time = 0
        self._num_awaited = 0  # free pages that the grant to ``_awaited_by`` waits for
        self._awaited_by: Request | None = None

    # ---- room -------------------------------------------------------------------------------------------------------

    def needs(self, request: Request, *, decodes: bool) -> int:
        """The most window pages that a request holds if it is computed here in chunks.

        Args:
            decodes: it goes on with its output.
        """
        most = self._most_held(request.num_tokens, self.kv_window.chunk_tokens)
        return max(most, self.needs_to_decode(request)) if decodes else most

    def needs_to_decode(self, request: Request) -> int:
        """The most window pages that a request holds if its prompt comes from another node.

        Tokens of steps that are not committed may be computed again.
        """
        return self._most_held(request.num_tokens + request.num_left, 1 + MAX_UNCOMMITTED)

    def _most_held(self, num_tokens: int, num_new: int) -> int:
        return min(self.kv_window.num_pages(num_tokens), self.kv_window.max_span(num_new), self.num_pages)

    @property
    def num_free(self) -> int:
        """Window pages that a peer may write to now."""
        return len(self._free)

    @property
    def num_unreserved(self) -> int:
        """Window pages that further requests can reserve."""
        return self.num_pages - self.num_reserved - len(self._orphans)

    # ---- prefixes ---------------------------------------------------------------------------------------------------

    def num_usable(self, pages: Sequence[int], received_from: int | None = None) -> int:
        """Pages of the longest prefix of cached ``pages`` after which a request can go on.

        Args:
            received_from: index of the first page whose window page the request needs once it has received its other
                pages from a peer; None: it computes the token after the prefix.
        """
        if received_from is not None:
            missing = (index for index in range(received_from, len(pages)) if self._page_of[pages[index]] < 0)
            return next(missing, len(pages))
        num_present, end = 0, len(pages)
        for index in range(len(pages) - 1, -1, -1):
            if self._page_of[pages[index]] < 0:
                num_present, end = 0, index
                continue
            num_present += 1
            if num_present == self.kv_window.num_seen:
                break
        return end

    # ---- pages of requests ------------------------------------------------------------------------------------------

    def admit(self, request: Request, num_cached: int, count: int) -> None:
        """Reserve ``count`` pages for a request that goes on after ``num_cached`` cached tokens."""
        assert not request.window_reserved and count <= self.num_unreserved
        request.window_reserved = count
        self.num_reserved += count
        request.window_first = request.window_end = self.kv_window.first_seen(num_cached)

    def advance(self, request: Request, start: int, end: int) -> None:
        """Hold exactly the pages that a step needs to compute the tokens at positions ``start .. end - 1``.

        A page that is given up may be used again at once: steps run one after another.
        """
        self._give_up(request, self.kv_window.first_seen(start))
        for page in request.pages[request.window_end : self.kv_window.num_pages(end)]:
            if self._page_of[page] < 0:
                assert request.window_end >= start // self.page_size, "a page that was computed has no window page"
                self._page_of[page] = self._take()
                self._holds[page] = 1
            else:
                self._hold(page)
            request.window_end += 1
        assert request.window_end - request.window_first <= request.window_reserved, "more pages than were reserved"

    def settle(self, request: Request, num_tokens: int, *, decodes: bool) -> None:
        """Keep only what the token after the last of ``num_tokens`` sees, and what the output needs.

        Args:
            decodes: the request goes on here; otherwise nothing more is computed of it.
        """
        self._give_up(request, self.kv_window.first_seen(num_tokens))
        count = request.window_end - request.window_first
        if decodes:
            count = max(count, self.needs_to_decode(request))
        assert count <= request.window_reserved
        self.num_reserved += count - request.window_reserved
        request.window_reserved = count

    def release(self, request: Request) -> None:
        """Hold nothing for a request any more, and let it wait for nothing. Idempotent."""
        if request is self._awaited_by:
            self._num_awaited, self._awaited_by = 0, None
        self._give_up(request, request.window_end)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.num_reserved -= request.window_reserved
        request.window_first = request.window_end = request.window_reserved = 0

    def _give_up(self, request: Request, first: int) -> None:
        """Hold no page before this index."""
        first = max(first, request.window_first)
        for page in request.pages[request.window_first : min(first, request.window_end)]:
            self._drop(page, is_left_behind=first < request.window_end)
        request.window_first = first
        request.window_end = max(request.window_end, first)

    def _hold(self, page: int) -> None:
        self.num_idle -= not self._holds[page]
        self._holds[page] += 1

    def _drop(self, page: int, *, is_left_behind: bool = False) -> None:
        assert self._holds[page] > 0
        self._holds[page] -= 1
        if not self._holds[page]:
            self._now_idle(page, self._left_behind if is_left_behind else self._idle)

    def _now_idle(self, page: int, queue: deque[tuple[int, int]]) -> None:
        self.num_idle += 1
        self._time += 1
        self._idle_since[page] = self._time
        queue.append((page, self._time))
        if len(queue) > 2 * self.num_pages + 64:
            current = [entry for entry in queue if self._is_idle(*entry)]
            queue.clear()
            queue.extend(current)

    def _is_idle(self, page: int, since: int) -> bool:
        return self._page_of[page] >= 0 and not self._holds[page] and self._idle_since[page] == since

    def _take(self) -> int:
        """A window page for a step, possibly a lingering one: the step runs after the steps that may use it."""
        if self._num_awaited and self.num_idle and len(self._free) <= self._num_awaited:
            return self._evict()
        if self._free:
            return self._free.pop()
        if self._lingering:
            pages = self._lingering[0][1]
            taken = pages.pop()
            self.num_lingering -= 1
            if not pages:
                self._lingering.popleft()
            return taken
        return self._evict()

    def _evict(self) -> int:
        """Take the window page of the full page that is the first to go."""
        while True:
            queue = self._left_behind or self._idle
            assert queue, "requests hold more window pages than they have reserved"
            page, since = queue.popleft()
            if self._is_idle(page, since):
                self.num_idle -= 1
                return self._unmap(page)

    def _unmap(self, page: int) -> int:
        taken, self._page_of[page] = self._page_of[page], -1
        return taken

    # ---- pages that a peer writes -----------------------------------------------------------------------------------

    def reserve_grant(
        self, request: Request, cached: Sequence[int], num_tokens: int, *, last_step: int, num_spare: int = 0
    ) -> bool:
        """Reserve window pages for a request whose first pages are ``cached``; a peer will write its other pages.

        False: there is no room, or not before the steps in flight have ended; nothing has changed then.

        Args:
            last_step: see ``freed``.
            num_spare: window pages that must remain unreserved.
        """
        count = self.needs_to_decode(request)
        if count + num_spare > self.num_unreserved:
            return False
        self.admit(request, num_tokens, count)
        held = cached[request.window_first :]
        for page in held:
            self._hold(page)
        num_new = self.kv_window.num_pages(num_tokens) - max(request.window_first, len(cached))
        while len(self._free) + self.num_lingering < num_new and self.num_idle:
            self._put(self._evict(), last_step)
        self._num_awaited, self._awaited_by = 0, None
        if len(self._free) < num_new:
            self._num_awaited, self._awaited_by = num_new, request
            for page in held:
                self._drop(page)
            self._forget(request)
            return False
        request.window_end += len(held)
        return True

    def take_grant(self, request: Request) -> None:
        """Give window pages to the pages of the request, now that it has all."""
        for page in request.pages[request.window_end :]:
            assert self._page_of[page] < 0
            self._page_of[page] = self._free.pop()
            self._holds[page] = 1
            request.window_end += 1

    def withdraw_grant(self, request: Request, num_kept: int) -> None:
        """A transfer has failed: only its first ``num_kept`` pages are the request's, and will be freed or cached.

        The others keep their window pages until they are ``freed``, if that has not happened yet.
        """
        last = max(request.window_first, min(num_kept, request.window_end))
        self._orphans.update(page for page in request.pages[last : request.window_end] if self._page_of[page] >= 0)
        for page in request.pages[request.window_first : last]:
            self._drop(page)
        self._forget(request)

    # ---- full pages are freed ---------------------------------------------------------------------------------------

    def freed(self, pages: Iterable[int], last_step: int) -> None:
        """Free the window pages of these freed full pages.

        Args:
            last_step: the last step in flight; 0 without any.
        """
        for page in pages:
            if self._page_of[page] < 0:
                continue
            if not self._holds[page]:
                self.num_idle -= 1
            self._holds[page] = 0
            self._orphans.discard(page)
            self._put(self._unmap(page), last_step)

    def _put(self, taken: int, last_step: int) -> None:
        if not last_step:
            self._free.append(taken)
            return
        self.num_lingering += 1
        if self._lingering and self._lingering[-1][0] == last_step:
            self._lingering[-1][1].append(taken)
        else:
            self._lingering.append((last_step, [taken]))

    def end_step(self, step: int) -> None:
        while self._lingering and self._lingering[0][0] <= step:
            pages = self._lingering.popleft()[1]
            self.num_lingering -= len(pages)
            self._free += pages

    def give(self, source: int, target: int) -> None:
        """Two full pages hold the same tokens: if ``target`` has no window page, give it that of ``source`` if idle."""
        if self._page_of[source] < 0 or self._holds[source] or self._page_of[target] >= 0:
            return
        self._page_of[target] = self._unmap(source)
        self.num_idle -= 1
        self._now_idle(target, self._idle)

    # ---- page tables ------------------------------------------------------------------------------------------------

    def deltas(self, begun: Sequence[Request], going_on: Iterable[Request]) -> tuple[PageDelta, ...]:
        """What the executor must know of window pages before a step.

        Entries before the window name a page in which every place is written.

        Args:
            begun: requests that have got their slots since the last step.
            going_on: other requests of the step.
        """
        deltas = []
        for request in begun:
            known = [self._page_of[page] for page in request.pages[request.window_first : request.window_end]]
            deltas.append(PageDelta(request.slot, 0, (known[0],) * request.window_first + tuple(known)))
            request.window_sent = request.window_end
        is_begun = {request.key for request in begun}
        for request in going_on:
            first, end = request.window_sent, request.window_end
            if first < end and request.key not in is_begun:
                known = [self._page_of[page] for page in request.pages[first:end]]
                deltas.append(PageDelta(request.slot, first, tuple(known)))
                request.window_sent = end
        return tuple(deltas)

    # ---- transfers --------------------------------------------------------------------------------------------------

    def num_slabs(self, num_pages: int, num_tokens: int) -> int:
        """Slabs that a transfer of a prompt of ``num_tokens`` ships of its first ``num_pages`` pages."""
        num_windowed = max(0, num_pages - self.kv_window.first_seen(num_tokens))
        return self.groups.num_slabs(num_pages, num_windowed)

    def transfer_length(self, num_tokens: int) -> int:
        """The length of the transfer of a prompt: a page of tokens for each slab."""
        return self.num_slabs(self.kv_window.num_pages(num_tokens), num_tokens) * self.page_size

    def slabs(self, pages: Sequence[int], first: int, num_tokens: int) -> list[int]:
        """The slabs that a transfer ships of pages from index ``first`` of a prompt on, in the order of the prompt."""
        slabs: list[int] = []
        full, windowed, first_windowed = (
            self.groups.full_slabs,
            self.groups.window_slabs,
            self.kv_window.first_seen(num_tokens),
        )
        for index, page in enumerate(pages, first):
            if index >= first_windowed:
                start = self._base + self._page_of[page] * windowed
                assert start >= self._base, "a page that must be sent has no window page"
                slabs += range(start, start + windowed)
            slabs += range(page * full, (page + 1) * full)
        return slabs

    def pages_of(self, slabs: Iterable[int]) -> list[int]:
        """The full pages that are complete with ``slabs``, since their last slabs are among them, in the same order."""
        full = self.groups.full_slabs
        return [slab // full for slab in slabs if slab < self._base and slab % full == full - 1]

    def gauges(self) -> dict[str, float]:
        """Window pages by what they are used for."""
        return {
            "window_pages": float(self.num_pages),
            "unreserved_window_pages": float(self.num_unreserved),
            "held_window_pages": float(self.num_pages - len(self._free) - self.num_lingering - self.num_idle),
        }

    # ---- proof ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything. Raises InvariantError: a count or a list is wrong."""
        mapped = [page for page in self._page_of if page >= 0]
        unmapped = self._free + [page for _, pages in self._lingering for page in pages]
        invariant(
            sorted(mapped + unmapped) == list(range(self.num_pages)), "a window page is lost, or has two full pages"
        )
        invariant(len(unmapped) - len(self._free) == self.num_lingering, "lingering window pages are miscounted")
        idle = {page for page, window_page in enumerate(self._page_of) if window_page >= 0 and not self._holds[page]}
        invariant(len(idle) == self.num_idle, f"{len(idle)} window pages are idle, not {self.num_idle}")
        queued = {page for page, since in (*self._left_behind, *self._idle) if self._is_idle(page, since)}
        invariant(queued == idle, "an idle window page is not in the queue")
        invariant(
            all(page >= 0 or not holds for page, holds in zip(self._page_of, self._holds, strict=True)),
            "a window page is held that is not there",
        )
        invariant(self.num_unreserved >= 0, "more window pages are reserved than exist")

    def check_requests(self, requests: Iterable[Request]) -> None:
        """Prove that exactly the window pages of these requests are held, beside those of transfers that failed."""
        holds = [0] * len(self._holds)
        num_reserved = 0
        for request in requests:
            num_reserved += request.window_reserved
            invariant(
                request.window_end - request.window_first <= request.window_reserved,
                f"{request.key} holds more window pages than it has reserved",
            )
            for page in request.pages[request.window_first : request.window_end]:
                holds[page] += 1
        invariant(num_reserved == self.num_reserved, "reserved window pages are miscounted")
        extra = [ours - theirs for ours, theirs in zip(self._holds, holds, strict=True)]
        invariant(
            all(count == (page in self._orphans) for page, count in enumerate(extra)),
            "a window page is held by an unknown request",
        )
