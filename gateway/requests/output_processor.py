"""One output on its way to the client: token messages in any order become text, in order, and end exactly once.

Prefill sends the first token and decode the rest, over two connections, so the second may arrive first. Each message
says which output token it begins with; what comes early waits. Text leaves here only when no stop string can begin in
it any more. Ids and log-probabilities tell of every token that was made and counted; text ends before a stop string and
without the stop token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import RequestError
from common.sampling_params import SamplingParams, TokenLogprobs
from common.wire.messages import Tokens
from gateway.text.stop_strings import StopMatcher
from gateway.text.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One output that a client wants, validated and in token ids.

    Attributes:
        rid: unique among those in flight.
        request_id: of the HTTP request it belongs to; the same for all outputs of a batch.
        prompt: token ids, at least one.
        model: the name of the model that is asked.
        prompt_number: which of the request's prompts this is a sample of.
        echo: text of the prompt, shown before the output; empty if it is not wanted.
        judged_from: prompt tokens are listed with log-probabilities from here on, the first of them without.
        is_prompt_only: the client wants the prompt judged and no output; nodes make one token, which nobody sees.
        stops: stop strings; none is empty.
        keep_stop: what stopped the output is shown.
        priority, is_priority_named: higher is more urgent; and whether the client named one.
        priority_class, tenant: on whose account it is served; empty for nobody's in particular.
        expected_output: output tokens that there will probably be; 0 if nobody knows.
        timeout_s: the client's deadline, from the request's arrival.
    """

    rid: str
    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    model: str = ""
    prompt_number: int = 0
    echo: str = ""
    judged_from: int | None = None
    is_prompt_only: bool = False
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special: bool = True
    salt: str = ""
    priority: int = 0
    is_priority_named: bool = False
    priority_class: str = ""
    tenant: str = ""
    expected_output: int = 0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Delta:
    """What has been added to an output since the last look; ``first`` is the index of its first token."""

    text: str
    first: int
    ids: list[int]
    logprobs: list[TokenLogprobs | None]
    is_last: bool


@dataclass(slots=True, eq=False)
class OutputStream:
    """One output. Fed by the control plane, read by an HTTP handler.

    Args:
        number: place among the outputs of its HTTP request.
        wake: called with the relay whenever there is something new to read.
        on_end: called once, when it ends; ``finish`` or ``error`` is set by then.
        on_gap: called with the mean time between tokens, in seconds, and how many tokens came in it.

    Attributes:
        ids, logprobs: every output token so far.
        prompt_logprobs: of the prompt, from where the ask wants them; there with the first token.
        finish: "stop" or "length" once it ended well.
        matched: what stopped it: a token id or a stop string.
        error: why it ended, if it failed.
        started_at, sent_at, first_at, last_at, ended_at: instants in seconds; 0 while they have not come.
    """

    ask: GenerateRequest
    number: int
    detokenizer: Detokenizer
    wake: Callable[["OutputStream"], None]
    on_end: Callable[["OutputStream"], None]
    started_at: float
    on_gap: Callable[[float, int], None] | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str = ""
    matched: int | str | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    sent_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0
    _text: list[str] = field(default_factory=list)
    _num_text_taken: int = 0
    _num_ids_taken: int = 0
    _early: dict[int, Tokens] = field(default_factory=dict)
    _stops: StopMatcher | None = None

    def __post_init__(self) -> None:
        if self.ask.stops:
            self._stops = StopMatcher(self.ask.stops, is_kept=self.ask.keep_stop)

    @property
    def is_ended(self) -> bool:
        return self.ended_at > 0.0

    @property
    def text(self) -> str:
        """All the text that may be shown so far."""
        return "".join(self._text)

    def on_tokens(self, message: Tokens, now: float) -> None:
        """Takes one token message, and those that waited for it."""
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
        self.wake(self)

    def fail(self, error: RequestError, now: float) -> None:
        """Ends it with an error, unless it has ended already."""
        if not self.is_ended:
            self.error = error
            self._end(now)
            self.wake(self)

    def take(self) -> Delta | None:
        """What is new since the last call; None if nothing is. An ended output gives its last delta once."""
        first, num_text = self._num_ids_taken, self._num_text_taken
        if first == len(self.ids) and num_text == len(self._text) and not self.is_ended:
            return None
        self._num_ids_taken, self._num_text_taken = len(self.ids), len(self._text)
        text = self._text[num_text] if len(self._text) == num_text + 1 else "".join(self._text[num_text:])
        return Delta(text, first, self.ids[first:], self.logprobs[first:], self.is_ended)

    def _append(self, message: Tokens, num_known: int, now: float) -> None:
        if message.index == 0 and not self.first_at:
            self.first_at = now
            self.cached_tokens = message.cached_tokens
            self.prompt_logprobs = message.prompt_logprobs
        elif self.on_gap is not None and len(message.tokens) > num_known:
            count = len(message.tokens) - num_known
            self.on_gap((now - self.last_at) / count, count)
        self.last_at = now
        if message.timings:
            self.timings.update(message.timings)
        if self.ask.is_prompt_only:
            self._finish("length", now)
            return
        tokens = message.tokens[num_known:]
        logprobs = message.logprobs[num_known:]
        is_hidden = message.finish == "stop" and not self.ask.keep_stop
        num_taken = self._show(tokens[:-1] if is_hidden else tokens)
        if self.matched is None:
            num_taken = len(tokens)
        self.ids.extend(tokens[:num_taken])
        self.logprobs.extend(logprobs[:num_taken])
        if self.matched is not None:
            self._finish("stop", now)
        elif message.finish:
            if message.finish == "stop" and message.tokens:
                self.matched = message.tokens[-1]
            self._finish(message.finish, now)

    def _show(self, tokens: tuple[int, ...]) -> int:
        """Turns tokens into text; returns how many it took before a stop string was complete."""
        stops = self._stops
        if stops is None:
            self._add(self.detokenizer.push(tokens))
            return len(tokens)
        for i, token in enumerate(tokens):
            text = self.detokenizer.push((token,))
            if len(self.ids) + i < self.ask.sampling.min_tokens:
                self._add(text)  # too early to stop
                continue
            self._add(stops.push(text))
            if stops.matched is not None:
                self.matched = stops.matched
                return i + 1
        return len(tokens)

    def _finish(self, reason: str, now: float) -> None:
        stops = self._stops
        tail = self.detokenizer.flush()
        if stops is not None:
            self._add(stops.push(tail))
            self._add(stops.flush())
            if stops.matched is not None:
                reason, self.matched = "stop", stops.matched
        else:
            self._add(tail)
        self.finish = reason
        self._end(now)

    def _add(self, text: str) -> None:
        if text:
            self._text.append(text)

    def _end(self, now: float) -> None:
        assert not self.is_ended, "an output ends once"
        self.ended_at = max(now, 1e-9)
        self._early.clear()
        self.on_end(self)
