"""Shares the chunk budget of each step between long prompts and shorter ones. Pure.

If the first prompt took the whole budget of each step until its end, one prompt of 500,000 tokens would block all
others on its node. A prompt is *long* if it has more tokens to compute than a threshold. While shorter prompts wait,
the long ones that have begun get ``share`` of the budget together, and the shorter ones get the rest. What one kind
leaves over goes to the other, so no step is filled less. Requests are still admitted in the one order of the node, so
that no prompt gets pages before another one because of its length, with one exception: only a few long prompts are in
progress at once, and the prompts behind one that may not begin yet pass it. A prompt that begins like a long one in
progress waits for as long as that one computes tokens that both have.

Short prompts that have begun go before those that wait, the one with the fewest tokens left first. The budget of the
long ones goes in turns to the first of them in order and to the one with the fewest tokens left. So a prompt of 8,000
tokens does not wait for one of 500,000, and a stream of such prompts does not stop the large one: compared with a node
that computes one prompt after the other, a long prompt takes at most ``2 / share`` times as long, and a shorter one
``1 / (1 - share)`` times.

A prompt that is more urgent than all begun long ones, by the rules of preemption, does not share with them; nor does a
long prompt with less urgent prompts. Every begun prompt has all of its pages, so however many have begun, each can end,
and none waits for pages that another one holds.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from common.cache.tree_node import TOKEN_BYTES
from common.request import Request, RequestKey
from common.scheduling.ordering import RequestOrdering
from common.scheduling.prefill_adder import PrefillAdder, PrefillLimits


class Turn(NamedTuple):
    """A prompt that a step tries next.

    Attributes:
        most: tokens that it may take; None for what is left of the step, 0 if it only waits.
        is_reserved: the step has kept these tokens for it.
    """

    request: Request
    most: int | None = None
    is_reserved: bool = False


class LongPrompts:
    """Decides in which order the prompts of a node get their chunks, and how large these may be.

    Nothing is shared without a chunk budget, or with one of less than two alignment units.
    """

    def __init__(self, limits: PrefillLimits, ordering: RequestOrdering, page_size: int) -> None:
        self._ordering = ordering
        self._page_size = page_size
        self._unit = limits.alignment.unit(page_size)
        self._share = limits.long_prompts.share
        self._max_begun = limits.long_prompts.max_begun
        self._kv_window = limits.kv_window
        budget = None if limits.chunk_tokens is None else min(limits.chunk_tokens, limits.max_prefill_tokens)
        is_divisible = budget is not None and budget >= 2 * self._unit
        self._is_shared = self._share < 1.0 and is_divisible
        self._threshold = limits.long_prompts.threshold or limits.chunk_tokens or 0
        self._is_shortest_turn = False

    def is_long(self, request: Request) -> bool:
        """Whether the request, begun or waiting, is a long prompt. One that resumes is not, until it has begun."""
        if request.pages:
            return request.num_to_compute > self._threshold
        return request.num_tokens > self._threshold and bool(request.watch) and request.num_uncached > self._threshold

    def may_begin(self, request: Request, begun: Iterable[Request]) -> bool:
        """Whether a waiting request that has room may begin beside these begun ones."""
        if not self._is_shared:
            return True
        long = [other for other in begun if self.is_long(other)]
        return self.may_begin_beside(long, request, is_long=self.is_long(request))

    def may_begin_beside(self, long: Collection[Request], request: Request, *, is_long: bool) -> bool:
        """Whether a waiting request may begin beside those of these long prompts that have begun.

        No request may while a long one that does not come after it computes its next tokens, unless it does not use
        the cache. A long one may begin only beside fewer than ``max_begun`` long ones in progress; less urgent ones do
        not count.
        """
        uses_cache = self._kv_window is None or self._kv_window.is_cached(request.num_tokens)
        if uses_cache and any(
            _is_computing_for(request, other, self._page_size) and not self._ordering.comes_first(request, other)
            for other in long
        ):
            return False
        if not is_long:
            return True
        in_progress = filter(_is_unfinished, long)
        return sum(not self._ordering.is_more_urgent(request, other) for other in in_progress) < self._max_begun

    def in_order(self, begun: Iterable[Request]) -> list[Request]:
        """Begun prompts in the order that they have among equals: short ones by what they have left, then long ones."""
        if not self._is_shared:
            return list(begun)
        return sorted(begun, key=lambda r: (True, 0) if self.is_long(r) else (False, r.num_tokens - r.num_scheduled))

    def turns(
        self,
        queue: Sequence[Request],
        adder: PrefillAdder,
        *,
        urgent: Request | None = None,
        is_here: Callable[[Request], bool] = lambda request: True,
    ) -> Iterator[Turn]:
        """The prompts of a step as they are tried; the caller adds each to ``adder`` before it takes the next.

        Args:
            queue: begun and waiting requests in order.
            urgent: a waiting request for which pages were taken from others; it begins whatever else has begun.
            is_here: whether this node computes a waiting request.
        """
        budget = adder.tokens_left if self._is_shared else None
        long = {} if budget is None else {r.key: r for r in queue if self.is_long(r) and (r.pages or is_here(r))}
        if budget is None or not long:
            return map(Turn, queue)
        step = _SharedStep(queue, long, adder, self._ordering, prompts=self, unit=self._unit)
        if step.begun:
            self._is_shortest_turn = not self._is_shortest_turn
        share = min(max(int(budget * self._share), self._unit), budget - self._unit) // self._unit * self._unit
        return step.turns(share, urgent, is_shortest_turn=self._is_shortest_turn)


class _SharedStep:
    """One step with long prompts.

    Args:
        long: the long prompts in ``queue``.

    Attributes:
        begun: long prompts with tokens that are not planned yet, in order.
    """

    def __init__(
        self,
        queue: Sequence[Request],
        long: Mapping[RequestKey, Request],
        adder: PrefillAdder,
        ordering: RequestOrdering,
        *,
        prompts: LongPrompts,
        unit: int,
    ) -> None:
        self._queue = queue
        self._long = long
        self._adder = adder
        self._ordering = ordering
        self._prompts = prompts
        self._unit = unit
        self._with_pages = {key: request for key, request in long.items() if request.pages}
        self.begun = [request for request in long.values() if _is_unfinished(request)]
        self._first = next((r for r in long.values() if not r.pages or _is_unfinished(r)), queue[0])

    def turns(self, share: int, urgent: Request | None, *, is_shortest_turn: bool) -> Iterator[Turn]:
        """First all prompts in order, within the budget that is not reserved; then the begun long ones; then every
        prompt that can use what is left."""
        tried: dict[RequestKey, None] = {}
        is_new_turn = is_shortest_turn or not self.begun
        for turn in self._in_order(share, urgent, is_new_turn=is_new_turn):
            if turn.most != 0:
                tried[turn.request.key] = None
            yield turn
            self._note_begun(turn.request)
        is_reserved = True
        for request in sorted(self.begun, key=self._num_left) if is_shortest_turn else self.begun:
            if _is_unfinished(request):
                yield Turn(request, self._adder.tokens_left if self._adder.chunks else None, is_reserved)
                is_reserved = False
        for request in self._queue:
            if _is_unfinished(request):
                yield Turn(request)
            elif request.key not in tried:
                yield Turn(request, None if self._may_begin(request, urgent) else 0)
                self._note_begun(request)

    def _note_begun(self, request: Request) -> None:
        """Note a long prompt that has begun in its turn. Only begun ones keep others waiting, and few have begun."""
        if request.pages and request.key in self._long:
            self._with_pages[request.key] = request

    def _in_order(self, share: int, urgent: Request | None, *, is_new_turn: bool) -> Iterator[Turn]:
        """The prompts in order, except long ones that have begun, for which a part of the budget is kept.

        A long prompt begins with no more than ``share``. Once a short one has to wait for that part, nothing after it
        begins, so that the order of admission stays.
        """
        reserved = min(share, sum(-(-self._num_left(r)[1] // self._unit) for r in self.begun) * self._unit)
        for request in self._queue:
            left = (self._adder.tokens_left or 0) - reserved
            if request.pages and request.key in self._long:
                continue
            if self.begun and self._is_before(request, self.begun[0]):
                yield Turn(request)
            elif request.key in self._long:
                most = min(share, left + reserved) if is_new_turn else left
                if most < self._unit and request is urgent:
                    return
                may_begin = request is urgent or (is_new_turn and self._may_begin(request, urgent))
                yield Turn(request, most if may_begin and most >= self._unit else 0)
                share -= (taken := left + reserved - (self._adder.tokens_left or 0))
                reserved = max(reserved - taken, 0)
            elif self._is_before(self._first, request):
                return
            elif not (request.pages or self._may_begin(request, urgent)):
                yield Turn(request, 0)
            elif not self.begun:
                yield Turn(request)
            elif left < self._unit:
                return
            else:
                yield Turn(request, left)

    def _may_begin(self, request: Request, urgent: Request | None) -> bool:
        if request is urgent:
            return True
        is_long = request.key in self._long
        return self._prompts.may_begin_beside(self._with_pages.values(), request, is_long=is_long)

    def _num_left(self, request: Request) -> tuple[bool, int]:
        """A sort key of a begun long prompt: whether it is less urgent than the first one, and what it lacks."""
        return self._is_before(self.begun[0], request), request.num_tokens - request.num_scheduled

    def _is_before(self, request: Request, other: Request) -> bool:
        return self._ordering.is_more_urgent(request, other)


def _is_unfinished(request: Request) -> bool:
    """Whether the request has begun and not all of its tokens are planned."""
    return bool(request.pages) and request.num_scheduled < request.num_tokens


def _is_computing_for(request: Request, other: Request, page_size: int) -> bool:
    """Whether the other request, which has begun, adds to the cache the page that this waiting request lacks first.

    Nothing but that page is compared, since prompts are long: two requests whose cached tokens end at one node of the
    tree have these tokens in common.
    """
    watch = request.watch
    if watch is None or watch.node is None or not other.pages or other.is_wrapped or other.salt != request.salt:
        return False
    start = watch.num_tokens * TOKEN_BYTES
    end = start + page_size * TOKEN_BYTES
    page = watch.key[start:end]
    if end > len(watch.key) or page != other.packed[start:end] or page in watch.node.children:
        return False
    return not start or other.node is watch.node
