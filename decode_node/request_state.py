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
    PAUSED = "paused"  # gave its slot to a more urgent one; its pages are all here
    RETRACTED = "retracted"  # lost its pages; waits, before its equals, to be computed or received again
    EXTENDING = "extending"  # its prompt (and output so far, if it was retracted) is computed here, chunk by chunk
    DONE = "done"


class Event(StrEnum):
    GRANT = "grant"
    RECEIVED = "received"
    TAKE_UP = "take up"
    PAUSE = "pause"
    RETRACT = "retract"
    LOSE = "lose"  # the pages of a retracted request will not come again from a prefill node
    EXTEND = "extend"
    SAMPLED = "sampled"
    END = "end"


TABLE: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.GRANT): State.RECEIVING,
    (State.RECEIVING, Event.RECEIVED): State.READY,
    (State.READY, Event.TAKE_UP): State.RUNNING,
    (State.RUNNING, Event.PAUSE): State.PAUSED,
    (State.PAUSED, Event.TAKE_UP): State.RUNNING,
    (State.RUNNING, Event.RETRACT): State.RETRACTED,
    (State.PAUSED, Event.RETRACT): State.RETRACTED,
    (State.READY, Event.RETRACT): State.RETRACTED,
    (State.EXTENDING, Event.RETRACT): State.RETRACTED,
    (State.RETRACTED, Event.GRANT): State.RECEIVING,
    (State.RECEIVING, Event.LOSE): State.RETRACTED,
    (State.WAITING, Event.EXTEND): State.EXTENDING,
    (State.RETRACTED, Event.EXTEND): State.EXTENDING,
    (State.EXTENDING, Event.SAMPLED): State.RUNNING,
    **{(state, Event.END): State.DONE for state in State if state is not State.DONE},
}
