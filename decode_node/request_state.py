"""The lifecycle of a request on a decode node.

Every state leads to ``DONE`` by the same release. A request that ends during its transfer leaves its granted pages to
the receiver, which keeps them in quarantine until no write can reach them.
"""

from enum import StrEnum


class State(StrEnum):
    COMPILING = "compiling"  # waits for its grammar, without pages
    WAITING = "waiting"  # in the queue, without pages
    RECEIVING = "receiving"  # pages are granted; the prefill node writes them
    READY = "ready"  # every page is here; waits for a slot
    RUNNING = "running"  # samples one token in each step
    PAUSED = "paused"  # gave its slot to another request, or its client is slow to read; its pages are all here
    RETRACTED = "retracted"  # lost its pages; waits, ahead of its equals, to be computed or received again
    MOVING = "moving"  # has left the batch; its pages go to another decode node
    EXTENDING = "extending"  # its prompt, and its output if it was retracted, is computed here in chunks
    DONE = "done"


class Event(StrEnum):
    COMPILED = "compiled"
    GRANT = "grant"
    RECEIVED = "received"
    JOIN_BATCH = "join batch"
    PAUSE = "pause"
    RETRACT = "retract"
    TRANSFER_LOST = "transfer lost"  # no prefill node computes the retracted request again
    EXTEND = "extend"
    SAMPLED = "sampled"
    MOVE = "move"
    END = "end"


TABLE: dict[tuple[State, Event], State] = {
    (State.COMPILING, Event.COMPILED): State.WAITING,
    (State.WAITING, Event.GRANT): State.RECEIVING,
    (State.WAITING, Event.EXTEND): State.EXTENDING,
    (State.RECEIVING, Event.RECEIVED): State.READY,
    (State.RECEIVING, Event.TRANSFER_LOST): State.RETRACTED,
    (State.READY, Event.JOIN_BATCH): State.RUNNING,
    (State.READY, Event.RETRACT): State.RETRACTED,
    (State.EXTENDING, Event.SAMPLED): State.RUNNING,
    (State.EXTENDING, Event.RETRACT): State.RETRACTED,
    (State.RUNNING, Event.PAUSE): State.PAUSED,
    (State.RUNNING, Event.RETRACT): State.RETRACTED,
    (State.PAUSED, Event.JOIN_BATCH): State.RUNNING,
    (State.PAUSED, Event.RETRACT): State.RETRACTED,
    **{(state, Event.MOVE): State.MOVING for state in (State.READY, State.RUNNING, State.PAUSED)},
    (State.RETRACTED, Event.GRANT): State.RECEIVING,
    (State.RETRACTED, Event.EXTEND): State.EXTENDING,
    **{(state, Event.END): State.DONE for state in State if state is not State.DONE},
}
