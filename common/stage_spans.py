"""Where a request spends its time on a node: the spans of its stages, in seconds of the node's own clock. Pure.

Nothing is written while a stage goes on: its span is made when the stage ends. The number of spans is bounded.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

#: In the order in which a request passes through them. ``prefill_chunk`` lies within ``prefill``, or within ``decode``
#: if a retracted request is computed again; ``retracted`` and ``paused`` interrupt ``prefill`` or ``decode``.
Stage = Literal[
    "prefill_queue",
    "prefill",
    "prefill_chunk",
    "decode_queue",
    "prefill_wait",
    "transfer",
    "batch_join",
    "decode",
    "retracted",
    "paused",
]

MAX_CHUNKS = 32
MAX_INTERRUPTIONS = 16


class StageSpan(NamedTuple):
    """One stage of a request on a node that is over.

    Attributes:
        amount: tokens of a prefill, a chunk or a decode, pages of a transfer; else 0.
    """

    stage: Stage
    start_s: float
    duration_s: float
    amount: int = 0


def between(stage: Stage, start_at: float, end_at: float, amount: int = 0) -> StageSpan:
    return StageSpan(stage, start_at, max(end_at - start_at, 0.0), amount)


@dataclass(slots=True, eq=False)
class StageLog:
    """The instants of one request on a node.

    Attributes:
        decoding_from: instant at which the request's own decoding began; 0 before. All earlier stages are reported.
    """

    decoding_from: float = 0.0
    _chunks: list[StageSpan] = field(default_factory=list)
    _interruptions: list[StageSpan] = field(default_factory=list)
    _interrupted: tuple[Stage, float] | None = None

    def add_chunk(self, start_at: float, end_at: float, num_tokens: int) -> None:
        """Note a computed chunk. Of too many, neighbours become one span."""
        chunks = self._chunks
        chunks.append(between("prefill_chunk", start_at, end_at, num_tokens))
        if len(chunks) > MAX_CHUNKS:
            pairs = zip(chunks[::2], chunks[1::2], strict=False)
            odd = chunks[-1:] if len(chunks) % 2 else []
            self._chunks = [*(_joined(first, second) for first, second in pairs), *odd]

    def interrupt(self, stage: Stage, now: float) -> None:
        """Note that the request lost its slot or its pages. A pause ends where a retraction begins."""
        if self._interrupted is not None:
            if self._interrupted[0] == stage:
                return
            self.resume(now)
        self._interrupted = (stage, now)

    def resume(self, now: float) -> None:
        """Note that the request goes on, if it was interrupted."""
        if self._interrupted is not None:
            stage, start_at = self._interrupted
            self._interrupted = None
            if len(self._interruptions) < MAX_INTERRUPTIONS:
                self._interruptions.append(between(stage, start_at, now))

    def take_prefill(self, received_at: float, now: float) -> list[StageSpan]:
        """The spans of a prompt that is computed here, or was until ``now``; its chunks are forgotten."""
        if not self._chunks:
            return [between("prefill_queue", received_at, now), *self._take_others(now)]
        begun_at = self._chunks[0].start_s
        num_tokens = sum(chunk.amount for chunk in self._chunks)
        queue, prefill = between("prefill_queue", received_at, begun_at), between("prefill", begun_at, now, num_tokens)
        return [queue, prefill, *self._take_others(now)]

    def take_decode(self, now: float, num_tokens: int) -> list[StageSpan]:
        """The spans from the beginning of the request's own decoding until ``now``."""
        if now <= self.decoding_from:
            return []
        return [between("decode", self.decoding_from, now, num_tokens), *self._take_others(now)]

    def _take_others(self, now: float) -> list[StageSpan]:
        self.resume(now)
        others = [*self._chunks, *self._interruptions]
        self._chunks, self._interruptions = [], []
        return others


def _joined(first: StageSpan, second: StageSpan) -> StageSpan:
    end_at = second.start_s + second.duration_s
    return between(first.stage, first.start_s, end_at, first.amount + second.amount)
