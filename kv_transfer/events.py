"""What becomes of a transfer, as reported to the roles at both ends."""

from dataclasses import dataclass, field

from common.errors import ErrorCode
from common.request import RequestKey
from common.wire.messages import PrefillDone


@dataclass(frozen=True, slots=True)
class Completed:
    """Everything is here.

    Attributes:
        pages: those granted, in order; still owned as ``GRANT``, and the caller's to move.
        prefill_done_at: when ``PrefillDone`` came, in seconds of the ``now`` given to the receiver.
    """

    key: RequestKey
    prefill_done: PrefillDone
    pages: tuple[int, ...]
    prefill_done_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended with its first token, so nothing more is shipped.

    Attributes:
        arrived: as in ``TransferFailed``.
    """

    key: RequestKey
    arrived: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Nothing more will come. The granted pages are free, or in quarantine, but for those that have arrived.

    Attributes:
        arrived: the first of the pages granted, as far as they have arrived whole and are full of tokens; still owned
            as ``GRANT``, and the caller's to move. No write can reach them any more, as in ``Completed``.
    """

    key: RequestKey
    code: ErrorCode
    message: str
    arrived: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class PairLost:
    """This prefill node has dropped our pool, or is dead. It must be connected again before it can write."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """To the prefill node: the transfer does not need its source pages any more.

    Attributes:
        ok: the decode node has everything, or the request ended with its first token.
        reason: a sentence for people.
        code: of the failure, if not ``ok``.
        is_told: the decode node ended the transfer, and tells the gateway why.
    """

    key: RequestKey
    ok: bool
    reason: str
    code: ErrorCode = ErrorCode.TRANSFER_FAILED
    is_told: bool = False


Event = Completed | Finished | TransferFailed | PairLost
