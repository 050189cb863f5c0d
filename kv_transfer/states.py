"""The states of a transfer at its two ends and the events that move it between them: one table for each end. Pure.

An event that a table does not allow is a bug of ours. What a peer sends is therefore tested with ``accepts`` of the
session first, and ignored where it cannot happen.
"""

from enum import StrEnum

#: How often the same unit of a page may be sent again because it came with other bytes.
MAX_RESENDS = 3

#: A prefill node ends transfers that have waited so long for a new connection. Longer than the decode node takes for
#: all its tries.
RESUME_LEASE_S = 60.0


class SendState(StrEnum):
    EARLY = "early"  # granted before the prefill node knows the request; kept for a while
    OPEN = "open"  # being computed; whole pages leave
    PREFILLED = "prefilled"  # the prompt is computed, the last pages leave or are on their way
    CLOSING = "closing"  # ended; no write starts any more, some may still be under way
    CLOSED = "closed"  # no write is under way or will ever start


class SendEvent(StrEnum):
    OPEN = "open"
    GRANT = "grant"
    COMPUTE = "compute"
    FINISH = "finish"
    START = "start"  # writes begin
    WRITTEN = "written"  # writes are over
    RESEND = "resend"  # pages arrived with other bytes and are written once more
    SUSPEND = "suspend"  # the connection broke; pages are granted again under the next one
    ACKNOWLEDGED = "acknowledged"
    RETRACT = "retract"  # the source pages of an ungranted transfer are needed elsewhere; they are computed again later
    END = "end"  # abort, cancel, failure, or an expired lease
    FENCE = "fence"  # no write is under way, or the connection is gone


SEND_TABLE: dict[tuple[SendState, SendEvent], SendState] = {
    (SendState.EARLY, SendEvent.GRANT): SendState.EARLY,
    (SendState.EARLY, SendEvent.SUSPEND): SendState.EARLY,
    (SendState.EARLY, SendEvent.OPEN): SendState.OPEN,
    (SendState.EARLY, SendEvent.END): SendState.CLOSING,
    (SendState.OPEN, SendEvent.GRANT): SendState.OPEN,
    (SendState.OPEN, SendEvent.SUSPEND): SendState.OPEN,
    (SendState.OPEN, SendEvent.COMPUTE): SendState.OPEN,
    (SendState.OPEN, SendEvent.FINISH): SendState.PREFILLED,
    (SendState.OPEN, SendEvent.START): SendState.OPEN,
    (SendState.OPEN, SendEvent.WRITTEN): SendState.OPEN,
    (SendState.OPEN, SendEvent.RESEND): SendState.OPEN,
    (SendState.OPEN, SendEvent.RETRACT): SendState.OPEN,
    (SendState.OPEN, SendEvent.END): SendState.CLOSING,
    (SendState.PREFILLED, SendEvent.GRANT): SendState.PREFILLED,
    (SendState.PREFILLED, SendEvent.SUSPEND): SendState.PREFILLED,
    (SendState.PREFILLED, SendEvent.START): SendState.PREFILLED,
    (SendState.PREFILLED, SendEvent.WRITTEN): SendState.PREFILLED,
    (SendState.PREFILLED, SendEvent.RESEND): SendState.PREFILLED,
    (SendState.PREFILLED, SendEvent.ACKNOWLEDGED): SendState.CLOSED,
    (SendState.PREFILLED, SendEvent.RETRACT): SendState.OPEN,
    (SendState.PREFILLED, SendEvent.END): SendState.CLOSING,
    (SendState.CLOSING, SendEvent.WRITTEN): SendState.CLOSING,
    (SendState.CLOSING, SendEvent.FENCE): SendState.CLOSED,
}


class ReceiveState(StrEnum):
    RESERVED = "reserved"  # pages are reserved; the prefill node does not know them yet, or cannot reach them
    GRANTED = "granted"  # waits for pages and PrefillDone
    PREFILLED = "prefilled"  # PrefillDone is here, pages are missing
    LANDED = "landed"  # every page is here, PrefillDone is missing
    COMPLETE = "complete"  # the pages belong to the caller
    QUARANTINED = "quarantined"  # given up, but the writer may still write
    FREED = "freed"  # the pages are free


class ReceiveEvent(StrEnum):
    GRANT = "grant"
    DELIVER = "deliver"  # some pages have arrived
    CORRUPT = "corrupt"  # some arrived with other bytes than were sent
    LAND = "land"  # every page of the prompt has arrived
    PREFILL_DONE = "prefill_done"
    SUSPEND = "suspend"  # the connection broke and the writer cannot write; pages are granted again under the next
    CANCEL = "cancel"  # this node gives up
    LOSE = "lose"  # the control connection is gone
    CLOSE = "close"  # the writer says that it will not write
    FENCE = "fence"  # the writer cannot write any more: dead, unmapped


RECEIVE_TABLE: dict[tuple[ReceiveState, ReceiveEvent], ReceiveState] = {
    (ReceiveState.RESERVED, ReceiveEvent.GRANT): ReceiveState.GRANTED,
    (ReceiveState.RESERVED, ReceiveEvent.PREFILL_DONE): ReceiveState.RESERVED,
    (ReceiveState.RESERVED, ReceiveEvent.CANCEL): ReceiveState.FREED,
    (ReceiveState.RESERVED, ReceiveEvent.LOSE): ReceiveState.FREED,
    (ReceiveState.RESERVED, ReceiveEvent.CLOSE): ReceiveState.FREED,
    (ReceiveState.RESERVED, ReceiveEvent.FENCE): ReceiveState.FREED,
    (ReceiveState.GRANTED, ReceiveEvent.GRANT): ReceiveState.GRANTED,
    (ReceiveState.GRANTED, ReceiveEvent.DELIVER): ReceiveState.GRANTED,
    (ReceiveState.GRANTED, ReceiveEvent.CORRUPT): ReceiveState.GRANTED,
    (ReceiveState.GRANTED, ReceiveEvent.LAND): ReceiveState.LANDED,
    (ReceiveState.GRANTED, ReceiveEvent.PREFILL_DONE): ReceiveState.PREFILLED,
    (ReceiveState.PREFILLED, ReceiveEvent.GRANT): ReceiveState.PREFILLED,
    (ReceiveState.PREFILLED, ReceiveEvent.DELIVER): ReceiveState.PREFILLED,
    (ReceiveState.PREFILLED, ReceiveEvent.CORRUPT): ReceiveState.PREFILLED,
    (ReceiveState.PREFILLED, ReceiveEvent.LAND): ReceiveState.COMPLETE,
    (ReceiveState.LANDED, ReceiveEvent.PREFILL_DONE): ReceiveState.COMPLETE,
    **{
        (state, event): after
        for state in (ReceiveState.GRANTED, ReceiveState.PREFILLED, ReceiveState.LANDED)
        for event, after in (
            (ReceiveEvent.SUSPEND, ReceiveState.RESERVED),
            (ReceiveEvent.CANCEL, ReceiveState.QUARANTINED),
            (ReceiveEvent.LOSE, ReceiveState.QUARANTINED),
            (ReceiveEvent.CLOSE, ReceiveState.FREED),
            (ReceiveEvent.FENCE, ReceiveState.FREED),
        )
    },
    (ReceiveState.QUARANTINED, ReceiveEvent.CLOSE): ReceiveState.FREED,
    (ReceiveState.QUARANTINED, ReceiveEvent.FENCE): ReceiveState.FREED,
}
