"""The transfers of a prefill node that are not over and, for a while, how the others ended. Pure.

A transfer begins with the role's ``open`` or with a decode node's grant, whichever comes first. Two things are kept
under a lease: a grant for a request that is not known here yet, and a transfer whose connection broke, until its pages
are granted again.

A transfer may be over for the role before the last of its writes is; see ``Sender``. Until then it lingers.
"""

from common.errors import invariant
from common.request import RequestKey
from common.wire.messages import PrefillDone
from kv_transfer.send.session import SendSession
from kv_transfer.send.tombstones import Tombstones, TransferEnd
from kv_transfer.states import RESUME_LEASE_S, SendState

EARLY_LEASE_S = 30.0
MAX_EARLY = 4_096


class SendTable:
    """All transfers of a prefill node.

    Attributes:
        sessions: opened by the role, and not closed.
        early: granted before the role has opened the request, by (peer, key), with the end of the lease.
        prefill_dones: messages of computed prompts that wait for the first grant, or for one after a break.
        lingering: sessions that are over for the role while writes are under way.
        tombstones: ends of transfers that are over.
    """

    def __init__(self) -> None:
        self.sessions: dict[RequestKey, SendSession] = {}
        self.early: dict[tuple[str, RequestKey], tuple[SendSession, float]] = {}
        self.prefill_dones: dict[RequestKey, PrefillDone] = {}
        self.lingering: list[SendSession] = []
        self.tombstones = Tombstones()
        self._suspended: dict[RequestKey, tuple[float, str]] = {}  # end of the lease, and why

    def active(self, key: RequestKey) -> SendSession | None:
        """The role's transfer, unless it is over or ending."""
        session = self.sessions.get(key)
        return None if session is None or session.state is SendState.CLOSING else session

    def open(self, key: RequestKey, peer: str, now: float) -> TransferEnd | None:
        """Open a transfer for the role. A ``TransferEnd``: it was over before that."""
        assert key not in self.sessions, f"{key} is open already"
        tombstone = self.tombstones.get(peer, key)
        if tombstone is not None:
            return tombstone
        session, _ = self.early.pop((peer, key), (None, 0.0))
        if session is None:
            session = SendSession(key, peer)
        else:
            session.open()
            if session.is_suspended:
                self._suspended[key] = (now + RESUME_LEASE_S, "the connection to the decode node broke")
        self.sessions[key] = session
        return None

    def for_grant(self, peer: str, key: RequestKey, now: float) -> SendSession | TransferEnd:
        """The transfer that a grant is for: opened, or kept until the role opens it. A ``TransferEnd``: the grant is
        refused.
        """
        session = self.sessions.get(key)
        if session is not None and session.peer != peer:
            return TransferEnd("unknown", "this request goes to another decode node")
        if session is not None:
            return session
        if (peer, key) not in self.early:
            if len(self.early) >= MAX_EARLY:
                return TransferEnd("unknown", f"{MAX_EARLY} grants already wait for their requests")
            self.early[peer, key] = (SendSession(key, peer, SendState.EARLY), now + EARLY_LEASE_S)
        return self.early[peer, key][0]

    def of_peer(self, peer: str, key: RequestKey) -> SendSession | None:
        """The transfer to this peer with that key, opened or not."""
        session = self.sessions.get(key)
        if session is not None and session.peer == peer:
            return session
        return self.early.get((peer, key), (None, 0.0))[0]

    def to(self, peer: str) -> list[SendSession]:
        return [session for session in self.sessions.values() if session.peer == peer]

    def sever_early(self, peer: str, end: TransferEnd, now: float, *, is_resumed: bool) -> None:
        """Drop early grants of a peer whose connection has ended, unless they will be granted again."""
        for owner, key in [known for known in self.early if known[0] == peer]:
            if is_resumed:
                self.early[owner, key][0].suspend()
            else:
                del self.early[owner, key]
                self.tombstones.add(peer, key, end, now=now)

    def suspend(self, session: SendSession, why: str, now: float, *, is_fenced: bool) -> None:
        """The decode node will connect and grant again; the lease says until when."""
        session.suspend(is_fenced=is_fenced)
        self._suspended.setdefault(session.key, (now + RESUME_LEASE_S, why))

    def resume(self, session: SendSession) -> None:
        """The transfer has been granted again, or for the first time."""
        self._suspended.pop(session.key, None)

    def expired(self, now: float) -> list[tuple[SendSession, TransferEnd]]:
        """Transfers whose lease is over, and how they end; old tombstones are dropped."""
        found: list[tuple[SendSession, TransferEnd]] = []
        for session, until in self.early.values():
            if until > now:
                break
            end = TransferEnd("unknown", f"the request did not come within {EARLY_LEASE_S:.0f} s of the grant")
            found.append((session, end))
        for key, (until, why) in self._suspended.items():
            if until > now:
                break
            end = TransferEnd("failed", f"{why}; no new connection within {RESUME_LEASE_S:.0f} s")
            found.append((self.sessions[key], end))
        self.tombstones.expire(now)
        return found

    def forget(self, session: SendSession, end: TransferEnd, now: float) -> bool:
        """Remove a transfer that is over. True: the role opened it, and must be told."""
        key, peer = session.key, session.peer
        self.early.pop((peer, key), None)
        self.tombstones.add(peer, key, end, now=now)
        if self.sessions.get(key) is not session:
            return False
        del self.sessions[key]
        self.prefill_dones.pop(key, None)
        self._suspended.pop(key, None)
        return True

    def is_lingering(self, peer: str, key: RequestKey) -> bool:
        """Whether writes of a transfer with that key to this peer are still under way."""
        return any((session.peer, session.key) == (peer, key) for session in self.lingering)

    def peers(self) -> list[str]:
        """Decode nodes that are expected to connect again."""
        return [self.sessions[key].peer for key in self._suspended]

    def all(self) -> list[SendSession]:
        """Every transfer that is not over, or lingers."""
        return [*self.sessions.values(), *(session for session, _ in self.early.values()), *self.lingering]

    def check(self) -> None:
        for session in self.all():
            session.check()
            invariant(session.state is not SendState.CLOSED, "a closed transfer is still in the books")
            has_lease = session.state is SendState.EARLY or session.key in self._suspended
            invariant(
                has_lease or not session.is_suspended or session.state is SendState.CLOSING, "it would wait for ever"
            )
            invariant(
                session.state is not SendState.CLOSING or session.num_in_flight, "a transfer could close and did not"
            )
        invariant(self.prefill_dones.keys() <= self.sessions.keys(), "something is left of a transfer")
        invariant(len(self.early) <= MAX_EARLY, "too many early grants are kept")
