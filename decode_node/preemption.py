"""Who gives way on a decode node: rows and pages that pass from less urgent requests to more urgent ones. Pure.

Short of a row, the least urgent running request is paused: its pages stay, so it goes on where it was. Short of pages,
the least urgent lose theirs until there are enough for the first in line; if there would never be enough, nobody is
touched. Without a more urgent request in line, pages are taken only where the batch itself outgrows the pool.
"""

from collections import Counter

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import release
from common.request import Request
from common.scheduling.ordering import RequestOrdering
from decode_node.prealloc_queue import PreallocQueue
from decode_node.request_state import Event, State
from decode_node.request_table import RequestTable


class Preemptor:
    """Pauses and retractions of one decode node.

    Args:
        line: of those that wait for pages.
        is_by_priority: when the batch outgrows the pool the least urgent gives way; otherwise the one with the shortest
            output, whose loss costs the least work.
    """

    def __init__(
        self,
        cache: RadixCache,
        books: PageAllocator,
        places: RequestTable,
        *,
        line: PreallocQueue,
        order: RequestOrdering,
        is_by_priority: bool,
    ) -> None:
        self.totals: Counter[str] = Counter(retractions=0, preemptions=0, pauses=0)
        self._cache = cache
        self._books = books
        self._places = places
        self._line = line
        self._order = order
        self._is_by_priority = is_by_priority

    def make_room(self, now: float) -> bool:
        """Retract less urgent requests so that the first in line gets its pages, if that is enough; before ``plan``.

        Returns:
            True if somebody was retracted: call ``line.admit`` then.
        """
        places = self._places
        partial = [] if self._line.partial is None else [self._line.partial]
        if not self._order.rules.is_enabled or not (places.waiting or places.retracted or partial):
            return False
        holders = places.yielding()
        others = map(self._order.priority, [*places.retracted.values(), *partial])
        if not self._order.may_beat(max([places.waiting.highest_priority, *others]), holders):
            return False
        first = next(iter(self._line.sort(now)))
        weaker = self._order.least_first(other for other in holders if self._order.beats(first, other))
        if not weaker or self._waits_for_another(first):
            return False
        if not self._line.lacks_pages(first) or self._line.lacks_pages(first, weaker):
            return False
        num_retracted = 0
        while weaker and self._line.lacks_pages(first):
            self.retract(weaker.pop(0), now, "its pages go to the more urgent {}", first.rid)
            num_retracted += 1
        self.totals["preemptions"] += num_retracted
        return True

    def _waits_for_another(self, request: Request) -> bool:
        """Pages are not what it lacks now."""
        if request is self._line.partial:
            return False
        if self._line.is_computed_here(request):
            is_new = self._places.states[request.key] is State.WAITING
            return is_new and self._line.sharing().waits_for(request, self._cache) is not None
        return self._line.is_full_for(request) or self._line.admission.match(request).pending is not None

    def retract(self, request: Request, now: float, reason: str, *args: object) -> None:
        """Take the pages; their KV stays in the cache as long as nobody needs the room."""
        release(self._cache, self._books, request, keep=True)
        self._places.move(request, Event.RETRACT, with_slot=False)
        self.totals["retractions"] += 1
        self._line.decisions.note(now, request.rid, "retract", reason, *args)

    def _row_victim(self, request: Request) -> Request | None:
        """The least urgent request in a row, if this one may take its place."""
        in_rows = [*self._places.running.values(), *self._places.extending.values()]
        weaker = self._order.least_first(other for other in in_rows if self._order.beats(request, other))
        return weaker[0] if weaker else None

    def can_have_row(self, request: Request) -> bool:
        return self._places.has_slot or (self._order.rules.is_enabled and self._row_victim(request) is not None)

    def free_row(self, request: Request, now: float) -> None:
        """A free row for this request: the least urgent in a row is paused or, half computed, retracted."""
        if self._places.has_slot:
            return
        victim = self._row_victim(request)
        assert victim is not None
        self.totals["preemptions"] += 1
        if victim.key in self._places.extending:
            self.retract(victim, now, "its row goes to the more urgent {}", request.rid)
            return
        self._places.move(victim, Event.PAUSE, with_slot=False)
        self.totals["pauses"] += 1
        self._line.decisions.note(now, victim.rid, "pause", "its row goes to the more urgent {}", request.rid)

    def victim(self) -> Request | None:
        """Least work lost (fewest output tokens, then longest input, then the newest), or least urgent. Not the last
        that could run, but if a transfer waits for pages with part of them: then that one can go on."""
        places, order = self._places, self._order
        num_able = len(places.running) + len(places.ready) + len(places.paused)
        if num_able < 2 and self._line.partial is None:
            return None
        return min(
            [*places.running.values(), *places.paused.values()],
            key=lambda r: (
                order.claim_to_stay(r) if self._is_by_priority else (0.0, 0.0),
                len(r.output),
                -len(r.prompt),
                -r.arrived_at,
            ),
            default=None,
        )
