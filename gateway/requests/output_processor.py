"""One output on its way to the client: token messages become text, in order, and end exactly once.

The prefill node sends the first token and the decode node the rest, over two connections, so the second message may
arrive first. Each message carries the index of its first token; early messages wait. Text is released only when no stop
string can begin in it any more. Ids and log-probabilities cover every token that was generated and counted; text ends
before a stop string and without the stop token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import field

from common.errors import RequestError
from common.stage_spans import StageSpan
from common.wire.messages import Tokens
from common.wire.packed_logprobs import PackedLogprobs
from gateway.requests.input.generate_request import GenerateRequest, unbound
from gateway.text.detokenizer import Detokenizer
from gateway.text.output_parser import OutputParser, OutputPiece, ReasoningPiece, TextPiece
from gateway.text.stop_strings import StopMatcher
from gateway.tracing.trace_context import TraceContext

#: Names in the ``timings`` of ``/generate``, by stage; a stage that happens twice counts twice.
TIMINGS = {
    "prefill_queue": "prefill_queue_s",
    "prefill": "prefill_s",
    "decode_queue": "decode_queue_s",
    "prefill_wait": "prompt_wait_s",
    "transfer": "transfer_s",
    "batch_join": "join_s",
}
#: Messages with spans that are kept of one output. Nodes send three or four for each attempt.
MAX_REPORTS = 16
#: Tells the client of an unexpected error, which the gateway logs.
INTERNAL_ERROR = "the gateway failed on this request; its log says more"


def are_in_vocabulary(tokens: Sequence[int], vocab_size: int) -> bool:
    return min(tokens, default=0) >= 0 and max(tokens, default=0) < vocab_size


class StageReport(NamedTuple):
    """Spans that a node has sent.

    Attributes:
        node: its name.
        offset_s, error_s: by how much its clock was ahead of the gateway's, as estimated when they came.
        spans: by its own clock.
    """

    node: str
    offset_s: float
    error_s: float
    spans: Sequence[StageSpan]


class Delta(msgspec.Struct, frozen=True, gc=False):
    """The part of an output that is new since the last ``take``.

    Attributes:
        first: index of its first token.
        pieces: of the reasoning, text and tool calls, if the request has an ``output_format``; ``text`` holds all of
            them as the model wrote them.
    """

    text: str
    first: int
    ids: list[int]
    logprobs: list[PackedLogprobs]
    is_last: bool
    pieces: Sequence[OutputPiece] = ()


class OutputStream(msgspec.Struct, eq=False):
    """One output. Written by the dispatcher, read by an HTTP handler.

    A struct, since every request makes one, and a dataclass with so many fields takes several times as long to make.

    Args:
        number: index among the outputs of its HTTP request.
        new_detokenizer: called when the first token arrives.
        wake: called with the stream whenever there is something new to read.
        on_gap: called with the mean time between tokens, in seconds, and how many tokens came in it.
        x_request_id: header of the HTTP answer.
        created: Unix time at which the request came, which the answers to it and to its retries show.

    Attributes:
        ids, logprobs: every output token so far.
        pieces: of the reasoning, text and tool calls so far, if the request has an ``output_format``.
        num_reasoning_tokens: tokens of the reasoning; a token belongs to the part in which its text, or else the next
            text, appears.
        text_spans: with log-probabilities, for each text piece that tokens have made: its index among the pieces, the
            index of the first of these tokens, and the index behind the last.
        prompt_logprobs: of the prompt, from ``sampling.prompt_logprobs_from`` on; set with the first token.
        prompt_node: name of the node that computed the prompt for the first token.
        finish: "stop" or "length" after a normal end.
        is_ended_by_node: a node has sampled the last token, and counts the output as finished. Otherwise the output
            has failed, or ends with a stop string, which only the gateway finds.
        matched: the token id or stop string that ended it.
        is_local_prefill: the decode node computes the prompt too.
        attempt: nodes know the output by this number and its rid.
        num_attempts: how many times it was sent to nodes; more than once if nodes were lost.
        prefill, decode: names of the nodes it was sent to last; empty for none.
        trace: the trace that the client's ``traceparent`` names or that is exported; None for neither.
        reports: spans of the stages that are over on the nodes.
        started_at, sent_at, first_at, last_at, ended_at: instants in seconds; 0 until they are reached.
    """

    request: GenerateRequest
    number: int
    new_detokenizer: Callable[[], Detokenizer]
    wake: Callable[["OutputStream"], None]
    started_at: float
    on_gap: Callable[[float, int], None] | None = None
    x_request_id: str = ""
    trace: TraceContext | None = None
    created: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[PackedLogprobs] = field(default_factory=list)
    pieces: list[OutputPiece] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    text_spans: list[tuple[int, int, int]] = field(default_factory=list)
    prompt_logprobs: tuple[PackedLogprobs, ...] = ()
    prompt_node: str = ""
    finish: str = ""
    is_ended_by_node: bool = False
    matched: int | str | None = None
    error: RequestError | None = None
    is_local_prefill: bool = False
    cached_tokens: int = 0
    attempt: int = 0
    num_attempts: int = 0
    prefill: str = ""
    decode: str = ""
    reports: list[StageReport] = field(default_factory=list)
    sent_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0
    is_ended: bool = False
    _text: list[str] = field(default_factory=list)
    _num_text_taken: int = 0
    _num_ids_taken: int = 0
    _num_pieces_taken: int = 0
    _num_decided: int = 0  # tokens before this one belong to a part ...
    _num_shown: int = 0  # ... and those before this one are shown, or show where a part begins
    _early: dict[int, Tokens] = field(default_factory=dict)
    _detokenizer: Detokenizer | None = None
    _stops: StopMatcher | None = None
    _parser: OutputParser | None = None
    _is_plain: bool = False  # the output has begun, without stop strings and without a parser

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def end(self) -> str:
        """The reason of a normal end, or the code of its error; empty before its end."""
        return self.finish or ("" if self.error is None else str(self.error.code))

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the stages before the second token, by their names in ``/generate``."""
        seconds: dict[str, float] = {}
        for report in self.reports:
            for span in report.spans:
                if name := TIMINGS.get(span.stage):
                    seconds[name] = seconds.get(name, 0.0) + span.duration_s
        return seconds

    def on_spans(self, report: StageReport) -> None:
        if len(self.reports) < MAX_REPORTS:
            self.reports.append(report)

    def on_tokens(self, message: Tokens, now: float) -> None:
        """Take one token message, and early ones that it completes."""
        if self.is_ended:
            return
        known = len(self.ids)
        if message.index > known:
            self._early[message.index] = message
            return
        self._append(message, known - message.index, now)
        while self._early and not self.is_ended:
            early = self._early.pop(len(self.ids), None)
            if early is None:
                break
            self._append(early, 0, now)
        self._wake()

    @property
    def lacks_token(self) -> bool:
        """Whether a token has not come, and later ones of its node have. Only the first comes from another node."""
        return bool(self._early and self.ids)

    def drop_early(self) -> None:
        """Drop tokens that came before those in front of them: their attempt has ended, and the next sends them."""
        self._early.clear()

    def fail(self, error: RequestError, now: float) -> None:
        """End the output with an error, unless it has ended already."""
        if not self.is_ended:
            self.error = error
            self._end(now)
            self._wake()

    def _wake(self) -> None:
        self.wake(self)
        if self.is_ended:
            self.wake = _do_nothing  # no cycle of references is left behind: readers refer to their streams

    @property
    def num_untaken(self) -> int:
        """Tokens that the client's connection has not taken yet."""
        return len(self.ids) - self._num_ids_taken

    def take(self) -> Delta | None:
        """The part that is new since the last call; None if nothing is and the output has not ended."""
        ids, texts = self.ids, self._text
        first, num_text = self._num_ids_taken, self._num_text_taken
        if first == len(ids) and num_text == len(texts) and not self.is_ended:
            return None
        self._num_ids_taken, self._num_text_taken = len(ids), len(texts)
        text = texts[num_text] if len(texts) == num_text + 1 else "".join(texts[num_text:])
        num_pieces, self._num_pieces_taken = self._num_pieces_taken, len(self.pieces)
        return Delta(text, first, ids[first:], self.logprobs[first:], self.is_ended, self.pieces[num_pieces:])

    def rewind(self) -> None:
        """Make ``take`` begin again with the first token, for another reader."""
        self._num_ids_taken = self._num_text_taken = self._num_pieces_taken = 0

    def compact(self) -> None:
        """Free what an ended output does not need to be read again."""
        assert self.is_ended
        self.request = unbound(self.request)
        self._detokenizer = self._stops = self._parser = None

    def _append(self, message: Tokens, num_known: int, now: float) -> None:
        if message.index == 0 and not self.first_at:
            self.first_at = now
            self.cached_tokens = message.cached_tokens
            self.prompt_logprobs = message.prompt_logprobs
            self.prompt_node = self.prefill or self.decode
        elif self.on_gap is not None and len(message.tokens) > num_known:
            count = len(message.tokens) - num_known
            self.on_gap((now - self.last_at) / count, count)
        self.last_at = now
        if self._is_plain and not num_known and not message.finish:  # the usual case, kept short
            assert self._detokenizer is not None
            if text := self._detokenizer.push(message.tokens):
                self._text.append(text)
            self.ids += message.tokens
            self.logprobs += message.logprobs
            return
        self.is_ended_by_node = bool(message.finish)
        if self.request.is_prompt_only:
            self._finish("length", now)
            return
        tokens = message.tokens[num_known:]
        logprobs = message.logprobs[num_known:]
        is_hidden = message.finish == "stop" and not self.request.keep_stop
        shown = tokens[:-1] if is_hidden else tokens
        num_taken = self._show(shown)
        if self.matched is None:
            num_taken = len(tokens)
        self.ids.extend(tokens[:num_taken])
        self.logprobs.extend(logprobs[:num_taken])
        if self.matched is not None:
            self._finish("stop", now)
        elif message.finish:
            if message.finish == "stop" and message.tokens:
                self.matched = message.tokens[-1]
            self._finish(message.finish, now, num_hidden=len(tokens) - len(shown))

    def _show(self, tokens: tuple[int, ...]) -> int:
        """Turn tokens into text; return how many it took before a stop string was complete."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            detokenizer = self._detokenizer = self.new_detokenizer()
            if self.request.stops:
                self._stops = StopMatcher(self.request.stops, is_kept=self.request.keep_stop)
            if self.request.output_format is not None:
                self._parser = self.request.output_format.new_parser()
            self._is_plain = self._stops is None and self._parser is None
        stops = self._stops
        if self._parser is not None:
            return self._show_parsed(detokenizer, self._parser, tokens)
        if stops is None:
            self._add(detokenizer.push(tokens))
            return len(tokens)
        for i, token in enumerate(tokens):
            text = detokenizer.push((token,))
            if len(self.ids) + i < self.request.sampling.min_tokens:
                self._add(text)  # too early to stop
                continue
            self._add(stops.push(text))
            if stops.matched is not None:
                self.matched = stops.matched
                return i + 1
        return len(tokens)

    def _show_parsed(self, detokenizer: Detokenizer, parser: OutputParser, tokens: tuple[int, ...]) -> int:
        """As ``_show``, for an output with a parser. A marker may be a stop string, and none reaches across one."""
        assert self.request.output_format is not None
        markers, stops = self.request.output_format.markers, self._stops
        for i, token in enumerate(tokens):
            num_pieces = len(self.pieces)
            marker = markers.get(token)
            text = detokenizer.push((token,)) if marker is None else detokenizer.flush()
            if stops is not None and len(self.ids) + i >= self.request.sampling.min_tokens:
                text = stops.push(text)
                if stops.matched is None and marker is not None:
                    text += stops.flush()
                    if marker in self.request.stops:
                        self.matched = marker
            self._add(text)
            is_marker_shown = marker is not None and (self.matched is None or self.request.keep_stop)
            if stops is not None and stops.matched is not None:
                self.matched, is_marker_shown = stops.matched, False
            if marker is not None and is_marker_shown:
                self._text.append(marker)
                self.pieces += parser.push(marker, token)
            if text or is_marker_shown:
                self._num_shown = len(self.ids) + i + 1
            self._assign_tokens(num_pieces)
            if self.matched is not None:
                return i + 1
        return len(tokens)

    def _assign_tokens(self, num_pieces: int) -> None:
        """Assign the shown tokens that belong to no part yet to the last of the new pieces.

        Args:
            num_pieces: how many pieces there were before.
        """
        if len(self.pieces) == num_pieces:
            return
        last, first, end = self.pieces[-1], self._num_decided, self._num_shown
        if isinstance(last, ReasoningPiece):
            self.num_reasoning_tokens += end - first
        elif self.request.sampling.logprobs is not None and isinstance(last, TextPiece) and first < end:
            self.text_spans.append((len(self.pieces) - 1, first, end))
        self._num_decided = end

    def _finish(self, reason: str, now: float, *, num_hidden: int = 0) -> None:
        """End the output normally, with the text that is still held back.

        Args:
            num_hidden: tokens at the end that have no text.
        """
        stops, num_pieces = self._stops, len(self.pieces)
        tail = "" if self._detokenizer is None else self._detokenizer.flush()
        if stops is not None:
            tail = stops.push(tail) + stops.flush()
            if stops.matched is not None:
                reason, self.matched = "stop", stops.matched
        if tail:
            self._num_shown = len(self.ids) - num_hidden
        self._add(tail)
        if self._parser is not None:
            self.pieces += self._parser.flush()
            self._assign_tokens(num_pieces)
        self.finish = reason
        self._end(now)

    def _add(self, text: str) -> None:
        if text:
            self._text.append(text)
            if self._parser is not None:
                self.pieces += self._parser.push(text)

    def _end(self, now: float) -> None:
        assert not self.is_ended, "an output ends once"
        self.is_ended, self.ended_at = True, now
        self._early.clear()


def _do_nothing(stream: OutputStream) -> None:
    pass
