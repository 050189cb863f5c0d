"""The life of a request on a prefill node.

Source pages go back on one event only, ``RELEASED``: the transfer plane says that nothing reads them any more. Every
other end (the first token ends the output, an abort, a deadline) first closes the transfer and then waits for it.

Only a request for which the decode node has granted nothing yet can be retracted, since nothing of it is on its way.
That is what keeps several nodes from waiting for each other in a circle: a request with pages on both sides never waits
for one that has pages on the prefill side alone.
"""

from enum import StrEnum


class State(StrEnum):
    WAITING = "waiting"  # in the queue, no pages
    EXTENDING = "extending"  # holds all its pages and a slot; chunk after chunk is computed
    SENDING = "sending"  # the prompt is computed; pages are held until the decode node has them
    CLOSING = "closing"  # ended early; pages are held until the last write is over
    DONE = "done"


class Event(StrEnum):
    ADMIT = "admit"
    SAMPLED = "sampled"  # the last chunk is computed, and the output goes on elsewhere
    CLOSE = "close"  # first token ended it, abort, deadline, failure
    RETRACT = "retract"  # nobody waits for its pages yet, and somebody whose pages are awaited needs the room
    RELEASED = "released"


TABLE: dict[tuple[State, Event], State] = {
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
