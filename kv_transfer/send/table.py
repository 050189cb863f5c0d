"""The books of a prefill node's transfers: those that are not over, and for a while how those ended that are. Pure.

A transfer begins with the role's word or with a decode node's grant, whichever comes first. A grant for a request that
nobody here has heard of yet is kept under a lease; so is, after its connection broke, what is to be granted anew.

A transfer may be over for the role before the last of its writes is: see ``Sender``. Until then it lingers.
"""

from common.errors import invariant
from common.request import RequestKey
from common.wire.messages import PrefillDone
from kv_transfer.receive.connections import RESUME_LEASE_S
from kv_transfer.send.session import SendSession
from kv_transfer.send.tombstones import End, Tombs
from kv_transfer.states import Sending

EARLY_LEASE_S = 30.0
MAX_EARLY = 4_096


class Outgoing:
    """Attributes:
    sessions: opened by the role, and not closed.
    early: granted before the role has heard of the request, by (peer, key), with the end of the lease.
    ends: of sessions that are closing, what their peers and the role will be told.
    handoffs: of prompts that are computed, as long as nothing is granted, or not since a break.
    lingering: over for the role, but not their writes; and what their peers will be told after those.
    tombs: of transfers that are over.
    """

    def __init__(self) -> None:
        self.sessions: dict[RequestKey, SendSession] = {}
        self.early: dict[tuple[str, RequestKey], tuple[SendSession, float]] = {}
        self.ends: dict[RequestKey, End] = {}
        self.handoffs: dict[RequestKey, PrefillDone] = {}
        self.lingering: list[tuple[SendSession, End]] = []
        self.tombs = Tombs()
        self._suspended: dict[RequestKey, tuple[float, str]] = {}  # end of the lease, and why

    def live(self, key: RequestKey) -> SendSession | None:
        """The role's transfer, unless it is over or ending."""
        session = self.sessions.get(key)
        return None if session is None or session.state is Sending.CLOSING else session

    def open(self, key: RequestKey, peer: str, now: float) -> SendSession | End:
        """The role knows the request from now on. An ``End``: the transfer was over before that."""
        assert key not in self.sessions, f"{key} is open already"
        tomb = self.tombs.get(peer, key)
        if tomb is not None:
            return tomb
        session, _ = self.early.pop((peer, key), (None, 0.0))
        if session is None:
            session = SendSession(key, peer)
        else:
            session.open()
            if session.is_suspended:
                self._suspended[key] = (now + RESUME_LEASE_S, "the connection to the decode node broke")
        self.sessions[key] = session
        return session

    def granted(self, peer: str, key: RequestKey, now: float) -> SendSession | End:
        """Whose grant this is: a known request's, or that of one which we may yet hear of. An ``End``: refused."""
        session = self.sessions.get(key)
        if session is not None and session.peer != peer:
            return End("unknown", "this request goes to another decode node")
        if session is not None:
            return session
        if (peer, key) not in self.early:
            if len(self.early) >= MAX_EARLY:
                return End("unknown", f"{MAX_EARLY} grants wait for requests already")
            self.early[peer, key] = (SendSession(key, peer, Sending.EARLY), now + EARLY_LEASE_S)
        return self.early[peer, key][0]

    def of_peer(self, peer: str, key: RequestKey) -> SendSession | None:
        """This peer's transfer by that key, opened or not."""
        session = self.sessions.get(key)
        if session is not None and session.peer == peer:
            return session
        return self.early.get((peer, key), (None, 0.0))[0]

    def to(self, peer: str) -> list[SendSession]:
        """Every opened transfer to this peer."""
        return [session for session in self.sessions.values() if session.peer == peer]

    def sever_early(self, peer: str, end: End, now: float, *, is_resumed: bool) -> None:
        """What this peer granted too early goes with the connection, unless it will be granted anew."""
        for owner, key in [known for known in self.early if known[0] == peer]:
            if is_resumed:
                self.early[owner, key][0].suspend()
            else:
                del self.early[owner, key]
                self.tombs.bury(peer, key, end, now=now)

    def suspend(self, session: SendSession, why: str, now: float, *, is_fenced: bool) -> None:
        """The decode node will connect and grant anew; the lease says until when."""
        session.suspend(is_fenced=is_fenced)
        self._suspended.setdefault(session.key, (now + RESUME_LEASE_S, why))

    def resume(self, session: SendSession) -> None:
        """It has been granted anew, or for the first time."""
        self._suspended.pop(session.key, None)

    def late(self, now: float) -> list[tuple[SendSession, End]]:
        """Those whose lease is over, and how they are to end; tombstones of old are forgotten."""
        found: list[tuple[SendSession, End]] = []
        for session, until in self.early.values():
            if until > now:
                break
            end = End("unknown", f"the request did not come within {EARLY_LEASE_S:.0f} s of the grant")
            found.append((session, end))
        for key, (until, why) in self._suspended.items():
            if until > now:
                break
            end = End("failed", f"{why}; no new connection within {RESUME_LEASE_S:.0f} s")
            found.append((self.sessions[key], end))
        self.tombs.expire(now)
        return found

    def forget(self, session: SendSession, end: End, now: float) -> bool:
        """The transfer is over. True: the role has opened it, and is to be told."""
        key, peer = session.key, session.peer
        self.early.pop((peer, key), None)
        self.ends.pop(key, None)
        self.handoffs.pop(key, None)
        self._suspended.pop(key, None)
        self.tombs.bury(peer, key, end, now=now)
        if self.sessions.get(key) is not session:
            return False
        del self.sessions[key]
        return True

    def is_lingering(self, peer: str, key: RequestKey) -> bool:
        """Is a transfer by that key over but for writes to this peer?"""
        return any((session.peer, session.key) == (peer, key) for session, _ in self.lingering)

    def unlinger(self, session: SendSession) -> End:
        """No write of it is under way any more."""
        (at,) = [at for at, (known, _) in enumerate(self.lingering) if known is session]
        return self.lingering.pop(at)[1]

    def peers(self) -> list[str]:
        """Decode nodes that are expected to connect anew."""
        return [self.sessions[key].peer for key in self._suspended]

    def all(self) -> list[SendSession]:
        """Every transfer that is not over, or lingers."""
        early, lingering = self.early.values(), self.lingering
        return [*self.sessions.values(), *(session for session, _ in (*early, *lingering))]

    def check(self) -> None:
        """Prove the books; raises ``InvariantError``."""
        for session in self.all():
            session.check()
            invariant(session.state is not Sending.CLOSED, "a closed transfer is still in the books")
            is_ending = session.key in self.ends or self.is_lingering(session.peer, session.key)
            invariant(
                (session.state is Sending.CLOSING) == is_ending,
                "a closing transfer has no recorded end, or an end belongs to an open one",
            )
            has_lease = session.state is Sending.EARLY or session.key in self._suspended
            invariant(
                has_lease or not session.is_suspended or session.state is Sending.CLOSING, "it would wait for ever"
            )
            invariant(
                session.state is not Sending.CLOSING or session.num_in_flight, "a transfer could close and did not"
            )
        invariant(all(key in self.sessions for key in (*self.handoffs, *self.ends)), "something is left of a transfer")
        invariant(len(self.early) <= MAX_EARLY, "too many early grants are kept")
