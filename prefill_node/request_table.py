"""The request table of a prefill node. Pure."""

from common.scheduling import request_table
from common.scheduling.waiting_queue import WaitingQueue
from prefill_node.request_state import TABLE, Event, State


class RequestTable(request_table.RequestTable[State, Event]):
    """Every request of a prefill node, in the one queue of its state."""

    def __init__(self, num_slots: int, waiting: WaitingQueue) -> None:
        super().__init__(TABLE, State, with_slots=(State.EXTENDING,), waiting=waiting, num_slots=num_slots)
        self.extending = self._queue(State.EXTENDING)
        self.sending = self._queue(State.SENDING)
        self.closing = self._queue(State.CLOSING)
