"""Preemption on a decode node: which request is paused or retracted for a more important one. Pure.

If no slot is free, the least urgent running request is paused: its pages stay, and it continues later where it was.
If pages run short, the least urgent requests lose theirs until the first request in the queue fits; if all of them
together would not be enough, none is touched. Without a more urgent request in the queue, pages are taken only where
the batch itself outgrows the pool.

A request whose client is slow to read is held by the gateway: it is paused, and is the first to lose its pages.
"""

from collections import Counter

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import release
from common.request import LOWEST_PRIORITY, Request
from common.scheduling.ordering import RequestOrdering
from decode_node.prealloc_queue import PreallocQueue
from decode_node.request_state import Event
from decode_node.request_table import RequestTable


class Preemptor:
    """Pauses and retractions of one decode node.

    Args:
        queue: of the requests that wait for pages.
        is_by_priority: when the batch outgrows the pool the least urgent request is retracted; otherwise the one with
            the shortest output, whose loss costs the least work.
    """

    def __init__(
        self,
        cache: RadixCache,
        allocator: PageAllocator,
        table: RequestTable,
        *,
        queue: PreallocQueue,
        ordering: RequestOrdering,
        is_by_priority: bool,
    ) -> None:
        self.totals: Counter[str] = Counter(retractions=0, preemptions=0, pauses=0)
        self._cache = cache
        self._allocator = allocator
        self._table = table
        self._queue = queue
        self._ordering = ordering
        self._is_by_priority = is_by_priority

    def pause_held(self, now: float) -> None:
        """Take the slots of held requests, and their pages too if that gives the first in the queue its pages."""
        table = self._table
        for key in table.held:
            if key in table.running:
                self._pause(table.running[key], now, "its client is slow to read")
        held = table.held_with_pages()
        if not held or not (in_order := self._queue.sort(now)):
            return
        first = in_order[0]
        if self._waits_for_another(first, now) or self._queue.lacks_pages(first, held):
            return
        while held and self._queue.lacks_pages(first):
            self.retract(held.pop(0), now, "its client is slow to read, and {} needs its pages", first.rid)

    def preempt_for_first(self, now: float) -> bool:
        """Retract less urgent requests if that gives the first in the queue its pages. True if any was retracted."""
        table = self._table
        if not self._ordering.rules.is_enabled or not (table.waiting or table.retracted):
            return False
        holders = table.preemptible()
        waiting = [*table.waiting.values(), *table.not_held(table.retracted.values())]
        if not self._ordering.may_preempt_any(waiting, holders):
            return False
        if not (in_order := self._queue.sort(now)):
            return False
        first = in_order[0]
        weaker = self._ordering.in_preemption_order(
            other for other in holders if self._ordering.may_preempt(first, other, now)
        )
        if not weaker or self._waits_for_another(first, now):
            return False
        if not self._queue.lacks_pages(first) or self._queue.lacks_pages(first, weaker):
            return False
        while weaker and self._queue.lacks_pages(first):
            victim = weaker.pop(0)
            victim.num_preempted += 1
            self.totals["preemptions"] += 1
            self.retract(victim, now, "its pages go to the more urgent {}", first.rid)
        return True

    def _waits_for_another(self, request: Request, now: float) -> bool:
        """Whether the request lacks something other than pages."""
        if request.key in self._table.held:
            return True
        if self._queue.is_computed_here(request):
            if not self.can_have_slot(request, now):
                return True
            if not self._queue.long_prompts.may_begin(request, self._table.extending.values()):
                return True
            if not self._queue.may_share_prefix(request):
                return False
            return self._queue.sharing().holder_of(request, self._cache) is not None
        return self._queue.is_full_for(request) or self._queue.waits_for_prefix(request)

    def retract(self, request: Request, now: float, reason: str, *args: object) -> None:
        """Take the pages of a request; its KV stays cached while there is room."""
        release(self._cache, self._allocator, request)
        request.stages.interrupt("retracted", now)
        request.prompt_logprobs.clear()  # the prompt is computed again
        self._table.move(request, Event.RETRACT, with_slot=False)
        self.totals["retractions"] += 1
        self._queue.decisions.note(now, request.rid, "retract", reason, *args)

    def _slot_victim(self, request: Request, now: float) -> Request | None:
        """The least urgent request in a slot, if this one may take its place."""
        weaker = self._ordering.in_preemption_order(
            other for other in self._in_slots() if self._ordering.may_preempt(request, other, now)
        )
        return weaker[0] if weaker else None

    def _in_slots(self) -> list[Request]:
        return [*self._table.running.values(), *self._table.extending.values()]

    def lowest_in_slots(self) -> int:
        """The lowest priority of the requests in slots."""
        return min(map(self._ordering.priority, self._in_slots()), default=LOWEST_PRIORITY)

    def can_have_slot(self, request: Request, now: float, *, lowest: int = LOWEST_PRIORITY) -> bool:
        """Whether a slot is free, or the request may take the place of another one.

        Args:
            lowest: no request in a slot has a lower priority. It saves most requests a look at all slots.
        """
        if self._table.num_free_slots:
            return True
        rules = self._ordering.rules
        if not rules.is_enabled or self._ordering.priority(request) - lowest <= rules.preemption_threshold:
            return False
        return self._slot_victim(request, now) is not None

    def free_slot(self, request: Request, now: float) -> None:
        """Make sure that a slot is free: pause the least urgent request, or retract it if it is half computed."""
        if self._table.num_free_slots:
            return
        victim = self._slot_victim(request, now)
        assert victim is not None
        victim.num_preempted += 1
        self.totals["preemptions"] += 1
        if victim.key in self._table.extending:
            self.retract(victim, now, "its row goes to the more urgent {}", request.rid)
            return
        self._pause(victim, now, "its row goes to the more urgent {}", request.rid)

    def _pause(self, request: Request, now: float, reason: str, *args: object) -> None:
        request.stages.interrupt("paused", now)
        self._table.move(request, Event.PAUSE, with_slot=False)
        self.totals["pauses"] += 1
        self._queue.decisions.note(now, request.rid, "pause", reason, *args)

    def victim(self) -> Request | None:
        """The request to retract when the batch outgrows the pool; None if only one could run.

        A held request comes first. Otherwise it is the least urgent, or the one with the least work to lose: fewest
        output tokens, then longest prompt, then newest.
        """
        table, ordering = self._table, self._ordering
        held = table.held_with_pages()
        num_able = len(table.running) + len(table.ready) + len(table.paused)
        if num_able < 2:
            return None
        return min(
            held or [*table.running.values(), *table.paused.values(), *table.ready.values()],
            key=lambda r: (
                ordering.retraction_rank(r) if self._is_by_priority else (0.0, 0.0),
                len(r.output),
                -len(r.prompt),
                -r.arrived_at,
            ),
        )
