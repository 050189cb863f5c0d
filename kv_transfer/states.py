"""What a transfer can be in, and what can happen to it: one table for each of its ends. No I/O, no clock, no books.

What a table does not name is our own bug; what a peer sends is therefore tested with ``accepts`` of the sessions first
(``kv_transfer.send.session``), and ignored where it cannot happen.
"""

from enum import StrEnum


class Sending(StrEnum):
    EARLY = "early"  # granted before the prefill node has heard of the request; kept for a while
    OPEN = "open"  # being computed; whole pages leave
    HANDED = "handed"  # the prompt is computed, the last pages leave or are on their way
    CLOSING = "closing"  # ended; no write starts any more, some may still be under way
    CLOSED = "closed"  # no write is under way or will ever start


class SendEvent(StrEnum):
    OPEN = "open"
    GRANT = "grant"
    COMPUTE = "compute"
    FINISH = "finish"
    START = "start"  # writes begin
    WRITTEN = "written"  # writes are over
    RESEND = "resend"  # what was written came with other bytes: once more
    SUSPEND = "suspend"  # the connection broke: what was granted is granted anew under the next
    RECEIVED = "received"
    RETRACT = "retract"  # nothing was granted yet, and the source pages are needed elsewhere: computed again later
    END = "end"  # abort, cancel, failure, lease run out
    FENCE = "fence"  # nothing is under way, or the mapping is gone


SEND_TABLE: dict[tuple[Sending, SendEvent], Sending] = {
    (Sending.EARLY, SendEvent.GRANT): Sending.EARLY,
    (Sending.EARLY, SendEvent.SUSPEND): Sending.EARLY,
    (Sending.EARLY, SendEvent.OPEN): Sending.OPEN,
    (Sending.EARLY, SendEvent.END): Sending.CLOSING,
    (Sending.OPEN, SendEvent.GRANT): Sending.OPEN,
    (Sending.OPEN, SendEvent.SUSPEND): Sending.OPEN,
    (Sending.OPEN, SendEvent.COMPUTE): Sending.OPEN,
    (Sending.OPEN, SendEvent.FINISH): Sending.HANDED,
    (Sending.OPEN, SendEvent.START): Sending.OPEN,
    (Sending.OPEN, SendEvent.WRITTEN): Sending.OPEN,
    (Sending.OPEN, SendEvent.RESEND): Sending.OPEN,
    (Sending.OPEN, SendEvent.RETRACT): Sending.OPEN,
    (Sending.OPEN, SendEvent.END): Sending.CLOSING,
    (Sending.HANDED, SendEvent.GRANT): Sending.HANDED,
    (Sending.HANDED, SendEvent.SUSPEND): Sending.HANDED,
    (Sending.HANDED, SendEvent.START): Sending.HANDED,
    (Sending.HANDED, SendEvent.WRITTEN): Sending.HANDED,
    (Sending.HANDED, SendEvent.RESEND): Sending.HANDED,
    (Sending.HANDED, SendEvent.RECEIVED): Sending.CLOSED,
    (Sending.HANDED, SendEvent.RETRACT): Sending.OPEN,
    (Sending.HANDED, SendEvent.END): Sending.CLOSING,
    (Sending.CLOSING, SendEvent.WRITTEN): Sending.CLOSING,
    (Sending.CLOSING, SendEvent.FENCE): Sending.CLOSED,
}


class Receiving(StrEnum):
    RESERVED = "reserved"  # pages are set aside; the prefill node does not know them yet, or cannot reach them
    GRANTED = "granted"  # pages and handoff are awaited
    HANDED = "handed"  # the handoff is here, pages are missing
    LANDED = "landed"  # every page is here, the handoff is missing
    COMPLETE = "complete"  # pages are the caller's
    QUARANTINED = "quarantined"  # given up, but the writer may still write
    FREED = "freed"  # pages went back to the books


class ReceiveEvent(StrEnum):
    GRANT = "grant"
    DELIVER = "deliver"  # some pages are here
    CORRUPT = "corrupt"  # some came with other bytes than were sent
    LAND = "land"  # every page of the prompt is here
    HANDOFF = "handoff"
    SUSPEND = "suspend"  # the connection broke, and the writer cannot write: granted anew under the next
    CANCEL = "cancel"  # we give up
    LOSE = "lose"  # the control connection is gone
    CLOSE = "close"  # the writer says that it will not write
    FENCE = "fence"  # the writer cannot write any more: dead, unmapped


RECEIVE_TABLE: dict[tuple[Receiving, ReceiveEvent], Receiving] = {
    (Receiving.RESERVED, ReceiveEvent.GRANT): Receiving.GRANTED,
    (Receiving.RESERVED, ReceiveEvent.HANDOFF): Receiving.RESERVED,
    (Receiving.RESERVED, ReceiveEvent.CANCEL): Receiving.FREED,
    (Receiving.RESERVED, ReceiveEvent.LOSE): Receiving.FREED,
    (Receiving.RESERVED, ReceiveEvent.CLOSE): Receiving.FREED,
    (Receiving.RESERVED, ReceiveEvent.FENCE): Receiving.FREED,
    (Receiving.GRANTED, ReceiveEvent.GRANT): Receiving.GRANTED,
    (Receiving.GRANTED, ReceiveEvent.DELIVER): Receiving.GRANTED,
    (Receiving.GRANTED, ReceiveEvent.CORRUPT): Receiving.GRANTED,
    (Receiving.GRANTED, ReceiveEvent.LAND): Receiving.LANDED,
    (Receiving.GRANTED, ReceiveEvent.HANDOFF): Receiving.HANDED,
    (Receiving.HANDED, ReceiveEvent.GRANT): Receiving.HANDED,
    (Receiving.HANDED, ReceiveEvent.DELIVER): Receiving.HANDED,
    (Receiving.HANDED, ReceiveEvent.CORRUPT): Receiving.HANDED,
    (Receiving.HANDED, ReceiveEvent.LAND): Receiving.COMPLETE,
    (Receiving.LANDED, ReceiveEvent.HANDOFF): Receiving.COMPLETE,
    **{
        (state, event): after
        for state in (Receiving.GRANTED, Receiving.HANDED, Receiving.LANDED)
        for event, after in (
            (ReceiveEvent.SUSPEND, Receiving.RESERVED),
            (ReceiveEvent.CANCEL, Receiving.QUARANTINED),
            (ReceiveEvent.LOSE, Receiving.QUARANTINED),
            (ReceiveEvent.CLOSE, Receiving.FREED),
            (ReceiveEvent.FENCE, Receiving.FREED),
        )
    },
    (Receiving.QUARANTINED, ReceiveEvent.CLOSE): Receiving.FREED,
    (Receiving.QUARANTINED, ReceiveEvent.FENCE): Receiving.FREED,
}
