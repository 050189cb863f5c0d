"""Priorities that those who wait lend to transfers under way, and what prefill nodes have yet to be told of them. Pure.

A transfer is as urgent as the most urgent that waits for what it brings, or for the pages that only its end can free;
here, and on the prefill node that computes it. Loans are found anew with every pass over the line, by all who wait,
whether it comes to their turn or not: so a loan lasts for as long as its lender waits, and no longer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from common.request import LOWEST_PRIORITY, Request
from common.scheduling.ordering import RequestOrdering
from common.scheduling.skip_ahead import MAX_SKIP_AHEAD
from decode_node.page_reservation import Admission
from decode_node.request_table import Key, RequestTable


class Loans:
    """Attributes:
    changed: transfers that are lent another priority than their prefill nodes know of, or none any more
        (LOWEST_PRIORITY), and which.
    are_any: the last pass has found some: there has to be another when the lenders have gone.
    """

    def __init__(self, admission: Admission, places: RequestTable, order: RequestOrdering) -> None:
        self.changed: list[tuple[Key, int]] = []
        self._admission = admission
        self._places = places
        self._order = order
        self.are_any = False
        self._lent: dict[Key, int] = {}  # in this pass, to transfers
        self._told: dict[Key, int] = {}  # to prefill nodes

    def lend(self, request: Request) -> Key | None:
        """The transfer that brings the prefix this one waits for is as urgent as this one. Returns its key."""
        key, partial = self._admission.pending_for(request), self._admission.partial
        if key is None or (
            partial is not None and partial.key == key and not self._order.are_of_one_class(request, partial)
        ):
            return key  # see lend_to_partial
        self._order.lend(request, self._places.receiving[key], self._lent)
        return key

    def lend_behind(
        self, line: Iterator[Request], tried: Mapping[Key, Request], is_computed_here: Callable[[Request], bool]
    ) -> list[Request]:
        """So do those to whose turn it did not come. Returns the first that are more urgent than some transfer, if one
        has part of its pages.

        Args:
            line: those, first in line first; only as many are looked at as matter.
            tried: all others that were in line.
        """
        places, partial = self._places, self._admission.partial
        if not self._order.rules.is_enabled or not places.receiving:
            return []
        least = min(request.priority for request in places.receiving.values())
        num_above = places.waiting.num_above(least)
        retracted = [r for key, r in places.retracted.items() if r.priority > least and key not in tried]
        awaited = self._admission.awaited() if num_above else {}
        waiting = map(places.waiting.watched_by, awaited)
        for request in [*retracted, *(r for r in waiting if r.priority > least and r.key not in tried)]:
            if not is_computed_here(request):
                self.lend(request)
        if partial is None or not (num_above or retracted):
            return []
        above = (request for request in line if request.priority > least and request is not partial)
        num_tried = sum(r.priority > least and key in places.waiting for key, r in tried.items())
        return list(islice(above, min(MAX_SKIP_AHEAD + 1, num_above + len(retracted) - num_tried)))

    def lend_to_partial(self, waiting: Iterable[Request], must_wait: Callable[[Request], bool]) -> None:
        """The one with part of its pages is as urgent as those of its class who can get theirs only after it. Others do
        not come before all whom it would take pages from, and these would take them back as soon as it has all."""
        partial = self._admission.partial
        if partial is None or not self._order.rules.is_enabled:
            return
        for request in waiting:
            priority = self._order.loan(request, partial)
            is_more = priority > max(partial.priority, self._lent.get(partial.key, LOWEST_PRIORITY))
            if is_more and self._order.are_of_one_class(request, partial) and must_wait(request):
                self._lent[partial.key] = priority

    def settle(self) -> None:
        """The pass is over: every transfer is as urgent as who waits for it now."""
        lent, self._lent = self._lent, {}
        if not self._order.rules.is_enabled:
            return
        self.are_any = bool(lent)
        told, self._told = self._told, {}
        for key, request in self._places.receiving.items():
            loan = request.inherited_priority = lent.get(key, LOWEST_PRIORITY)
            if loan > request.priority:
                self._told[key] = loan
            if self._told.get(key) != told.get(key):
                self.changed.append((key, self._told.get(key, LOWEST_PRIORITY)))
