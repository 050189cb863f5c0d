"""What becomes of transfers, as the roles at both ends are told."""

from dataclasses import dataclass, field

from common.errors import ErrorCode
from common.request import RequestKey
from common.wire.messages import PrefillDone


@dataclass(frozen=True, slots=True)
class Completed:
    """Everything is here. ``pages`` (those granted, in order) are still ``GRANT``, and the caller's to move.

    ``handed_at``: when the handoff came, in seconds of the ``now`` handed in.
    """

    key: RequestKey
    handoff: PrefillDone
    pages: tuple[int, ...]
    handed_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended with its first token; nothing is shipped. Its granted pages are free."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Nothing more will come. Its granted pages are free, or in quarantine."""

    key: RequestKey
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class PairLost:
    """This prefill node has let go of our pool, or is dead. ``connect`` again before it can write."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """To the prefill node: the transfer has no more need of its source pages.

    Attributes:
        ok: the decode node has everything, or the request ended with its first token.
        reason: a sentence for people.
        code: of the failure, if not ``ok``.
        is_told: the decode node ended it, and tells the gateway why.
    """

    key: RequestKey
    ok: bool
    reason: str
    code: ErrorCode = ErrorCode.TRANSFER_FAILED
    is_told: bool = False


Event = Completed | Finished | TransferFailed | PairLost
