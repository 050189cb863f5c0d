"""What becomes of transfers to a decode node, as its role is told."""

from dataclasses import dataclass, field

from common.errors import ErrorCode
from common.messages import Handoff
from kv_transfer.session import Key


@dataclass(frozen=True, slots=True)
class Completed:
    """Everything is here. ``pages`` (those granted, in order) are still ``GRANT``, and the caller's to move.

    ``handed_at``: when the handoff came, in seconds of the ``now`` handed in.
    """

    key: Key
    handoff: Handoff
    pages: tuple[int, ...]
    handed_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended with its first token; nothing is shipped. Its granted pages are free."""

    key: Key


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Nothing more will come. Its granted pages are free, or in quarantine."""

    key: Key
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class PairLost:
    """This prefill node has let go of our pool, or is dead. ``connect`` again before it can write."""

    peer: str
    reason: str


Event = Completed | Finished | TransferFailed | PairLost
