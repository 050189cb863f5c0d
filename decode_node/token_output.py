"""Output tokens on their way from a decode node to the gateway, in messages of several tokens."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from common.node.gateways.outbox import Outbox
from common.node.request_messages import first_token_message
from common.request import Request, RequestKey
from common.stage_spans import StageSpan, between
from common.wire.messages import Spans, Tokens
from common.wire.packed_logprobs import pack_logprobs
from decode_node.scheduler import Sampled
from kv_transfer.events import Completed


class Arrival(NamedTuple):
    """A prompt that has come from a prefill node, and the instants of ``PrefillDone`` and of the last page."""

    num_pages: int
    prefill_done_at: float
    received_at: float


class TokenOutput:
    """Groups tokens into messages, and sends the spans of the stages that are over before them.

    Args:
        outbox: takes the messages.
        stream_interval: output tokens of one message, after the first token, which goes alone.
    """

    def __init__(self, outbox: Outbox, stream_interval: int) -> None:
        self.totals: Counter[str] = Counter(local_prefills=0, prompt_tokens=0, prompt_tokens_cached=0)
        self._outbox = outbox
        self._stream_interval = stream_interval
        self._unsent: dict[RequestKey, list[Sampled]] = {}  # tokens that wait to fill a message
        self._arrivals: dict[RequestKey, Arrival] = {}  # of requests without a token of their own yet

    @property
    def sends_each_token(self) -> bool:
        return self._stream_interval == 1

    def received(self, key: RequestKey, event: Completed, now: float) -> None:
        """Remember when a prompt arrived, for the spans that go with the request's next token."""
        self._arrivals[key] = Arrival(len(event.pages), event.prefill_done_at, now)

    def add(self, sampled: Sampled, now: float) -> None:
        """Send one more token: at once if it is the first or the last, else when a message is full."""
        request, finish = sampled.request, sampled.finish
        num_output = len(request.output)
        if num_output == 1:
            self._send_first(sampled, now)
        elif self._stream_interval == 1:
            if request.stages.decoding_from and not finish and sampled.logprobs is None:  # the usual case, kept short
                self._outbox.gateway.append(Tokens(request.rid, request.attempt, num_output - 1, (sampled.token,)))
            else:
                self._send([sampled], now)
        else:
            unsent = self._unsent.setdefault(request.key, [])
            unsent.append(sampled)
            if finish or len(unsent) >= self._stream_interval:
                self.flush(request, now)

    def flush(self, request: Request, now: float) -> None:
        """Send the tokens that wait to fill a message."""
        unsent = self._unsent.pop(request.key, None)
        if unsent:
            self._send(unsent, now)

    def flush_interrupted(self, now: float) -> None:
        """Flush the requests that have lost their rows: their next tokens may take long."""
        for request in [unsent[-1].request for unsent in self._unsent.values()]:
            if request.slot < 0:
                self.flush(request, now)

    def forget(self, key: RequestKey) -> None:
        """Drop what is kept of a request that has ended."""
        self._unsent.pop(key, None)
        self._arrivals.pop(key, None)

    def report_unfinished(self, request: Request, now: float, *, is_local: bool) -> None:
        """Send the spans of a request that ends without a last token.

        Args:
            is_local: its prompt is computed here.
        """
        if request.stages.decoding_from:
            spans: Sequence[StageSpan] = request.stages.take_decode(now, len(request.output) - request.num_earlier)
        elif is_local:
            spans = request.stages.take_prefill(request.received_at, now)
        else:
            spans = _handover(request, self._arrivals.get(request.key), now)
        self._report(request.key, spans)

    def _report(self, key: RequestKey, spans: Sequence[StageSpan]) -> None:
        if spans:
            self._outbox.gateway.append(Spans(*key, tuple(spans)))

    def _send_first(self, sampled: Sampled, now: float) -> None:
        """Send the first token of a prompt that was computed here."""
        request = sampled.request
        self.totals["local_prefills"] += 1
        self.totals["prompt_tokens"] += len(request.prompt)
        self.totals["prompt_tokens_cached"] += request.num_cached
        self._report(request.key, request.stages.take_prefill(request.received_at, now))
        request.stages.decoding_from = now
        self._outbox.gateway.append(first_token_message(request, sampled.token, sampled.logprobs, sampled.finish))

    def _send(self, unsent: list[Sampled], now: float) -> None:
        """Send the newest tokens of a request in one message."""
        request, token, _, finish = unsent[-1]
        rid, attempt = request.key
        index = len(request.output) - len(unsent)
        tokens = (token,) if len(unsent) == 1 else tuple([sampled.token for sampled in unsent])
        logprobs = tuple([pack_logprobs(sampled.logprobs) for sampled in unsent if sampled.logprobs is not None])
        self._report_stages(request, now, is_last=bool(finish))
        self._outbox.gateway.append(Tokens(rid, attempt, index, tokens, logprobs=logprobs, finish=finish))

    def _report_stages(self, request: Request, now: float, *, is_last: bool) -> None:
        """Send the spans of earlier stages with this node's first message, and of decoding with the last token."""
        log = request.stages
        spans: list[StageSpan] = []
        if not log.decoding_from:
            arrival = self._arrivals.pop(request.key, None)
            if arrival is not None:
                spans = _handover(request, arrival, now)
            else:  # computed here, to continue an earlier output
                spans = log.take_prefill(request.received_at, now)
            log.decoding_from = now
        if is_last:
            spans += log.take_decode(now, len(request.output) - request.num_earlier)
        self._report(request.key, spans)


def _handover(request: Request, arrival: Arrival | None, now: float) -> list[StageSpan]:
    """The stages of a request, whose prompt a prefill node computes, up to its first token from this node.

    The transfer counts from when the prefill node had computed the prompt and there was room for it here.
    """
    received_at, admitted_at = request.received_at, request.admitted_at
    if admitted_at < received_at:  # it has not been admitted
        return [between("decode_queue", received_at, now)]
    queue = between("decode_queue", received_at, admitted_at)
    if arrival is None:
        return [queue, between("prefill_wait", admitted_at, now)]
    prefill_done_at = max(arrival.prefill_done_at, admitted_at)
    return [
        queue,
        between("prefill_wait", admitted_at, prefill_done_at),
        between("transfer", prefill_done_at, arrival.received_at, arrival.num_pages),
        between("batch_join", arrival.received_at, now),
    ]
