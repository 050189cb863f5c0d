"""Requests of a node whose grammars are being compiled. Pure.

A request joins the waiting queue when its grammar is ready, so no step waits for a compiler and no other request waits
longer. A grammar is compiled once for all requests that have it, and stays compiled until the last of them has left the
node; so a retracted request never waits for its grammar again.
"""

from collections import Counter
from typing import NamedTuple

from common.errors import invariant
from common.request import Request, RequestKey

#: Seconds after its arrival at which a request fails if its grammar is not compiled yet.
COMPILE_TIMEOUT_S = 10.0
TIMEOUT_MESSAGE = f"the grammar was not compiled within {COMPILE_TIMEOUT_S:g} s; simplify it"


class CompileGrammar(NamedTuple):
    """Begin to compile a grammar, and tell the role when it is ready or has failed."""

    grammar: str


class DropGrammar(NamedTuple):
    """No request needs this grammar any more."""

    grammar: str


GrammarEffect = CompileGrammar | DropGrammar


class GrammarQueue:
    """The grammars of a node's requests, and the requests that wait for one.

    Attributes:
        waiting: requests whose grammars are being compiled, in order of arrival.
    """

    def __init__(self) -> None:
        self.waiting: dict[RequestKey, Request] = {}
        self._effects: list[GrammarEffect] = []
        self._num_requests: Counter[str] = Counter()
        self._is_compiled: dict[str, bool] = {}

    def enter(self, request: Request) -> bool:
        """Count a request that has arrived. Return whether it must wait for its grammar."""
        grammar = request.sampling.grammar
        if not grammar:
            return False
        self._num_requests[grammar] += 1
        if grammar not in self._is_compiled:
            self._is_compiled[grammar] = False
            self._effects.append(CompileGrammar(grammar))
        return not self._is_compiled[grammar]

    def leave(self, request: Request) -> None:
        """Discount a request that has left the node."""
        grammar = request.sampling.grammar
        if not grammar:
            return
        self._num_requests[grammar] -= 1
        if not self._num_requests[grammar]:
            del self._num_requests[grammar], self._is_compiled[grammar]
            self._effects.append(DropGrammar(grammar))

    def compiled(self, grammar: str) -> list[Request]:
        """Note that a grammar is ready. Return the requests that have waited for it; unknown grammars are ignored."""
        if grammar in self._is_compiled:
            self._is_compiled[grammar] = True
        return self.waiting_for(grammar)

    def waiting_for(self, grammar: str) -> list[Request]:
        """The requests that wait for this grammar."""
        return [request for request in self.waiting.values() if request.sampling.grammar == grammar]

    def overdue(self, now: float) -> list[Request]:
        """The requests that have waited too long."""
        found = []
        for request in self.waiting.values():
            if request.received_at + COMPILE_TIMEOUT_S > now:
                break
            found.append(request)
        return found

    def take_effects(self) -> list[GrammarEffect]:
        """The effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    def check(self, requests: list[Request]) -> None:
        """Prove that exactly the grammars of ``requests``, all on the node, are kept; raises ``InvariantError``."""
        counted = Counter(request.sampling.grammar for request in requests if request.sampling.grammar)
        invariant(counted == self._num_requests, "requests are miscounted by grammar")
        invariant(counted.keys() == self._is_compiled.keys(), "a grammar is kept without a request, or was dropped")
        is_early = any(self._is_compiled[request.sampling.grammar] for request in self.waiting.values())
        invariant(not is_early, "a request waits for a grammar that is compiled")
