"""The lifecycle of a request on a prefill node.

Source pages are given back on one event only, ``RELEASED``: the transfer plane says that nothing reads them any more.
Every other end (the first token ends the output, an abort, a deadline) closes the transfer first and waits for it.

A request can be retracted only while the decode node has granted no pages for it, since none of its pages is in transit
then. So a request with pages on both nodes never waits for a request with pages on the prefill node alone, and nodes
cannot wait for one another in a circle.
"""

from enum import StrEnum


class State(StrEnum):
    COMPILING = "compiling"  # waits for its grammar, without pages
    WAITING = "waiting"  # in the queue, without pages
    EXTENDING = "extending"  # has a slot and all of its pages; its chunks are computed one after the other
    SENDING = "sending"  # the prompt is computed; pages stay until the decode node has them
    CLOSING = "closing"  # ended early; pages stay until the last write is over
    DONE = "done"


class Event(StrEnum):
    COMPILED = "compiled"
    ADMIT = "admit"
    SAMPLED = "sampled"  # the last chunk is computed; the decode node continues the output
    CLOSE = "close"  # the first token ended the output, or an abort, a deadline or a failure
    RETRACT = "retract"  # a more important request gets its pages
    RELEASED = "released"


TABLE: dict[tuple[State, Event], State] = {
    (State.COMPILING, Event.COMPILED): State.WAITING,
    (State.COMPILING, Event.CLOSE): State.CLOSING,
    (State.COMPILING, Event.RELEASED): State.DONE,
    (State.WAITING, Event.ADMIT): State.EXTENDING,
    (State.WAITING, Event.CLOSE): State.CLOSING,
    (State.WAITING, Event.RELEASED): State.DONE,
    (State.EXTENDING, Event.SAMPLED): State.SENDING,
    (State.EXTENDING, Event.RETRACT): State.WAITING,
    (State.EXTENDING, Event.CLOSE): State.CLOSING,
    (State.EXTENDING, Event.RELEASED): State.DONE,
    (State.SENDING, Event.RETRACT): State.WAITING,
    (State.SENDING, Event.CLOSE): State.CLOSING,
    (State.SENDING, Event.RELEASED): State.DONE,
    (State.CLOSING, Event.RELEASED): State.DONE,
}
