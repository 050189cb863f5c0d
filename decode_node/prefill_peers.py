"""The prefill nodes that a decode node works with: which it has dialled, and when it dials one again. Pure.

The gateway names all prefill nodes that may send pages; they are dialled at once. One that a request names is dialled
too. A named node that was lost, or did not answer, is dialled again after a pause that doubles with each loss; until it
answers, its pair has a problem. A node that is no longer named is let go after a grace, when nothing uses it: a gateway
that has just started names the nodes one after another, as they register.

A node that starts again has the address of the process before it. Once the new process answers there, the one before it
has ended, even if no connection says so yet, and is not dialled any more. The address alone proves nothing: two nodes
may register the same one, of which only one can be reached, and a gateway may name processes in any order.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from common.wire.messages import MAX_SENTENCE, PairState, Peer

#: Seconds without any message after it was dialled, after which a prefill node counts as lost. A node that attaches for
#: longer says with a ``Ping`` that it lives.
ANSWER_S = 10.0
#: Seconds before a lost node is dialled again; the pause doubles up to the limit.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
#: Seconds for which a node that is no longer named stays connected.
UNNAMED_S = 60.0


@dataclass(slots=True)
class PrefillPeer:
    """One prefill node in one start.

    Attributes:
        is_dialled: there is a control connection, or one is being made.
        answer_by: when it must have answered; None once it has.
        answered_at: when it answered last, the first time after it was dialled.
        problem: why it was lost last; empty once it has answered.
        dial_at: when to dial it, if it is not dialled.
        num_losses: in a row, without an answer in between.
        named_until: when the gateway stopped naming it, or when it was dialled for a request.
    """

    peer: Peer
    is_dialled: bool = False
    answer_by: float | None = None
    answered_at: float = -math.inf
    problem: str = ""
    dial_at: float = 0.0
    num_losses: int = 0
    named_until: float = 0.0


class PrefillPeers:
    """All prefill nodes that are dialled or to be dialled, by incarnation."""

    def __init__(self) -> None:
        self._peers: dict[str, PrefillPeer] = {}
        self._named: dict[str, None] | None = None  # None: the gateway has named none yet
        self._due_at: float | None = None  # the value of `due_at`; None: to be computed again

    def _know(self, peer: Peer) -> PrefillPeer:
        self._due_at = None
        return self._peers.setdefault(peer.incarnation, PrefillPeer(peer))

    def has_ended(self, peer: Peer) -> bool:
        """Whether this node has answered, and another process at its address has answered since."""
        one = self._peers.get(peer.incarnation)
        return one is not None and self._is_replaced(one)

    def _is_replaced(self, one: PrefillPeer) -> bool:
        address, since = one.peer.address, one.answered_at
        return since > -math.inf and any(
            other.answered_at > since and other.peer.address == address for other in self._peers.values()
        )

    def name(self, nodes: Iterable[Peer], now: float) -> None:
        """Take the prefill nodes that the gateway names; they are all that it knows."""
        self._due_at = None
        for incarnation in self._named or ():
            self._peers[incarnation].named_until = now
        self._named = {}
        for peer in nodes:
            self._named[peer.incarnation] = None
            self._know(peer)
        for incarnation in [key for key, one in self._peers.items() if not one.is_dialled and key not in self._named]:
            del self._peers[incarnation]

    def dial(self, peer: Peer, now: float) -> bool:
        """Note that this node is dialled now. False: it is dialled already, or has ended."""
        known = self._peers.get(peer.incarnation)
        if known is not None and known.is_dialled:
            return False
        one = self._know(peer)
        if self._is_replaced(one):
            return False
        one.is_dialled, one.answer_by, one.named_until = True, now + ANSWER_S, now
        return True

    def answered(self, incarnation: str, now: float) -> list[str]:
        """Note that a node answers. Return the nodes with a connection to its address that have ended, as its first
        answer shows.
        """
        one = self._peers.get(incarnation)
        if one is None or not one.is_dialled or one.answer_by is None:
            return []
        self._due_at = None
        one.answer_by, one.answered_at, one.problem, one.num_losses = None, now, "", 0
        dialled = [(key, other) for key, other in self._peers.items() if other.is_dialled]
        return [key for key, other in dialled if other.peer.address == one.peer.address and self._is_replaced(other)]

    def lost(self, incarnation: str, why: str, now: float) -> bool:
        """Note that a connection is gone. False: there was none."""
        one = self._peers.get(incarnation)
        if one is None or not one.is_dialled:
            return False
        self._due_at = None
        if self._named is None or incarnation not in self._named:
            del self._peers[incarnation]
            return True
        one.is_dialled, one.answer_by, one.problem = False, None, why
        one.dial_at = now + min(FIRST_PAUSE_S * 2 ** min(one.num_losses, 30), MAX_PAUSE_S)
        one.num_losses += 1
        return True

    def due(self, now: float) -> list[Peer]:
        """The nodes to dial now."""
        waiting = [one for one in self._peers.values() if not one.is_dialled and one.dial_at <= now]
        return [one.peer for one in waiting if not self._is_replaced(one)]

    def overdue(self, now: float) -> list[str]:
        """The nodes that have not answered in time."""
        return [key for key, one in self._peers.items() if one.answer_by is not None and one.answer_by <= now]

    def unnamed(self, now: float) -> list[str]:
        """The connected nodes that the gateway has not named for ``UNNAMED_S``."""
        if self._named is None:
            return []
        since = now - UNNAMED_S
        others = [(key, one) for key, one in self._peers.items() if key not in self._named]
        return [key for key, one in others if one.is_dialled and one.named_until <= since]

    @property
    def due_at(self) -> float:
        """Before this instant, no node is overdue, to be dialled, or in ``unnamed``."""
        if self._due_at is None:
            self._due_at = self._find_due_at()
        return self._due_at

    def _find_due_at(self) -> float:
        named = self._named
        peers = self._peers.values()
        instants = [one.answer_by for one in peers if one.is_dialled and one.answer_by is not None]
        instants += [one.dial_at for one in peers if not one.is_dialled and not self._is_replaced(one)]
        if named is not None:
            instants += [one.named_until + UNNAMED_S for key, one in self._peers.items() if key not in named]
        return min(instants, default=math.inf)

    def problems(self, transport: str) -> list[PairState]:
        """The nodes that were lost and have not answered since, as pairs of this transport that cannot transfer."""
        return [
            PairState(one.peer.name, key, transport, "", one.problem[:MAX_SENTENCE])
            for key, one in self._peers.items()
            if one.problem
        ]
