"""Waiting requests kept in their order as they come, go and change, so that nobody sorts them anew. Pure.

Where each request's place follows from a number of its own (``Policy.rank``) the line is a sorted list: who comes is
filed into it, and whoever wants the first few takes those. With classes there is one list for each, and with ``fair``
one for each tenant; whose turn is when is then found while the line is walked along, not before.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from common.request import Request, RequestKey
from common.scheduling.ordering import Place, RequestOrdering
from common.scheduling.policies.fair import TokenCounters, cost_of

Entry = tuple[Place, Request]
Turn = tuple[float, Place, Request, float, Iterator[Entry]]


class SortedLine:
    """Args:
    order: one for which ``is_ranked`` holds.
    """

    def __init__(self, order: RequestOrdering) -> None:
        self._order = order
        self._lists: dict[str, list[Entry]] = {}  # by account; all are on one where nobody takes turns
        self._entries: dict[RequestKey, tuple[str, Entry]] = {}
        self._falls: list[tuple[float, int, RequestKey]] = []  # who goes last among its equals, when

    def add(self, request: Request, number: int, now: float = -float("inf")) -> None:
        """A request waits from now on. Its priority, what is lent to it included, and class must not change here.

        Args:
            number: its place among equals.
        """
        account = self._order.account(request)
        entry = (self._order.place(request, number, now), request)
        insort(self._lists.setdefault(account, []), entry)
        self._entries[request.key] = (account, entry)
        if now < (falls_at := self._order.policy.falls_at(request)) < float("inf"):
            heapq.heappush(self._falls, (falls_at, number, request.key))

    def remove(self, request: Request) -> int:
        """It waits no longer, or changes: call this before, and ``add`` after. Returns its number."""
        account, entry = self._entries.pop(request.key)
        entries = self._lists[account]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._lists[account]
        return entry[0][-1]

    def line(self, begun: Sequence[Request], now: float, among: Collection[Request] | None = None) -> Iterator[Request]:
        """First in line first, as ``RequestOrdering.merge`` has it. Whoever is taken out while it is walked along is
        passed over.

        Args:
            begun: those that are being worked on.
            among: only these of the waiting are wanted; others may be there as well.
        """
        self._let_fall(now)
        counters = self._order.turns
        if counters is None:
            entries = next(iter(self._lists.values()), [])
            waiting = _walk(entries) if among is None else iter(sorted(self._entries[r.key][1] for r in among))
            return _requests(heapq.merge(self._begun(begun, now), waiting))
        if not self._order.are_begun_in_turn:
            return chain(begun, self._in_turn(counters, {}))
        by_account: dict[str, list[Request]] = {}
        for request in begun:
            by_account.setdefault(self._order.account(request), []).append(request)
        numbers = {request.key: number for number, request in enumerate(begun)}
        mine = {
            account: sorted((self._order.place(r, numbers[r.key], now, has_begun=True), r) for r in requests)
            for account, requests in by_account.items()
        }
        return self._in_turn(counters, mine)

    def _begun(self, begun: Sequence[Request], now: float) -> list[Entry]:
        return sorted((self._order.place(r, number, now, has_begun=True), r) for number, r in enumerate(begun))

    def _let_fall(self, now: float) -> None:
        while self._falls and self._falls[0][0] <= now:
            _, number, key = heapq.heappop(self._falls)
            known = self._entries.get(key)
            if known is not None and known[1][0][-1] == number:
                request = known[1][1]
                self.remove(request)
                self.add(request, number, now)

    def _in_turn(self, counters: TokenCounters, begun: dict[str, list[Entry]]) -> Iterator[Request]:
        """As ``TokenCounters.interleave``, one at a time."""
        turns: list[Turn] = []
        for account in dict.fromkeys([*begun, *self._lists]):
            entries: Iterator[Entry] = heapq.merge(begun.get(account, []), _walk(self._lists.get(account, [])))
            place, request = next(entries)
            turns.append((counters.value(account), place, request, counters.weight(account), entries))
        heapq.heapify(turns)
        while turns:
            value, _, request, weight, entries = turns[0]
            value += cost_of(request) / weight  # as it is while it waits
            yield request
            following = next(entries, None)
            if following is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (value, *following, weight, entries))


def _walk(entries: list[Entry]) -> Iterator[Entry]:
    """All of a sorted list, from which may be taken meanwhile."""
    at = 0
    while at < len(entries):
        entry = entries[at]
        yield entry
        if at < len(entries) and entries[at] is entry:
            at += 1
        else:
            at = bisect_left(entries, entry)


def _requests(entries: Iterable[Entry]) -> Iterator[Request]:
    return (request for _, request in entries)
