"""The life of a request on a decode node.

``DONE`` is reached from everywhere by the same release. A request that ends while its transfer runs leaves its granted
pages to the receiver, which keeps them in quarantine until no write can reach them.
"""

from enum import StrEnum


class State(StrEnum):
    WAITING = "waiting"  # in the queue, no pages
    RECEIVING = "receiving"  # pages granted; the prefill node writes them
    READY = "ready"  # every page is here; waits for a slot
    RUNNING = "running"  # one token a step
    RETRACTED = "retracted"  # lost its pages; waits, before all others, to be computed again
    EXTENDING = "extending"  # its prompt (and output so far, if it was retracted) is computed here, chunk by chunk
    DONE = "done"


class Event(StrEnum):
    GRANT = "grant"
    RECEIVED = "received"
    TAKE_UP = "take up"
    RETRACT = "retract"
    EXTEND = "extend"
    SAMPLED = "sampled"
    END = "end"


TABLE: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.GRANT): State.RECEIVING,
    (State.RECEIVING, Event.RECEIVED): State.READY,
    (State.READY, Event.TAKE_UP): State.RUNNING,
    (State.RUNNING, Event.RETRACT): State.RETRACTED,
    (State.EXTENDING, Event.RETRACT): State.RETRACTED,
    (State.WAITING, Event.EXTEND): State.EXTENDING,
    (State.RETRACTED, Event.EXTEND): State.EXTENDING,
    (State.EXTENDING, Event.SAMPLED): State.RUNNING,
    **{(state, Event.END): State.DONE for state in State if state is not State.DONE},
}
