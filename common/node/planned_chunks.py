"""Times the chunks of prompts, from the plan of their step to its commit."""

from collections import deque
from collections.abc import Sequence

from common.scheduling.prefill_adder import Chunk


class PlannedChunks:
    """The chunks of outstanding steps, with the instants at which they were planned."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, Sequence[Chunk]]] = deque()

    def planned(self, chunks: Sequence[Chunk], now: float) -> None:
        self._steps.append((now, chunks))

    def committed(self, now: float) -> None:
        """Note the chunks of the oldest step with their requests; call it before the step changes anything."""
        planned_at, chunks = self._steps.popleft()
        for chunk in chunks:
            if chunk.is_current:
                log = chunk.request.stages
                log.add_chunk(planned_at, now, chunk.num_tokens)
                if chunk.is_last:
                    log.resume(now)
