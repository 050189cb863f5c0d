"""Output tokens on their way from a decode node to the gateway, in messages of several tokens."""

from collections import Counter

from common.node.outbox import Outbox
from common.node.role import first_token_message
from common.request import Request, RequestKey
from common.wire.messages import Tokens
from decode_node.scheduler import Sampled


class TokenOutput:
    """Groups tokens into messages.

    Args:
        outbox: takes the messages.
        stream_interval: output tokens of one message, after the first token, which goes alone.
    """

    def __init__(self, outbox: Outbox, stream_interval: int) -> None:
        self.totals: Counter[str] = Counter(local_prefills=0, prompt_tokens=0, prompt_tokens_cached=0)
        self._outbox = outbox
        self._stream_interval = stream_interval
        self._unsent: dict[RequestKey, list[Sampled]] = {}  # tokens that wait to fill a message
        self._received_at: dict[RequestKey, tuple[float, float]] = {}  # the handoff, and the last of the pages

    def received(self, key: RequestKey, *, prefill_done_at: float, received_at: float) -> None:
        """Remember when a prompt arrived, for the timings that go with the request's next token."""
        self._received_at[key] = (prefill_done_at, received_at)

    def add(self, sampled: Sampled, now: float) -> None:
        """Send one more token: at once if it is the first or the last, else when a message is full."""
        request, finish = sampled.request, sampled.finish
        num_output = len(request.output)
        if num_output == 1:
            self._send_first(sampled, now)
        elif self._stream_interval == 1:
            if num_output > 2 and not finish and sampled.logprobs is None:  # the usual case, kept short
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

    def forget(self, key: RequestKey) -> None:
        """Drop what is kept of a request that has ended."""
        self._unsent.pop(key, None)
        self._received_at.pop(key, None)

    def _send_first(self, sampled: Sampled, now: float) -> None:
        """Send the first token of a prompt that was computed here."""
        request = sampled.request
        self.totals["local_prefills"] += 1
        self.totals["prompt_tokens"] += len(request.prompt)
        self.totals["prompt_tokens_cached"] += request.num_cached
        self._outbox.gateway.append(first_token_message(request, sampled.token, sampled.logprobs, sampled.finish, now))

    def _send(self, unsent: list[Sampled], now: float) -> None:
        """Send the last tokens of a request."""
        request, token, logprobs, finish = unsent[-1]
        rid, attempt = request.key
        index = len(request.output) - len(unsent)
        tokens = (token,) if len(unsent) == 1 else tuple([sampled.token for sampled in unsent])
        token_logprobs = () if logprobs is None else tuple([sampled.logprobs for sampled in unsent])
        timings = self._timings(request, now) if index == 1 and request.key in self._received_at else {}
        self._outbox.gateway.append(
            Tokens(rid, attempt, index, tokens, logprobs=token_logprobs, finish=finish, timings=timings)
        )

    def _timings(self, request: Request, now: float) -> dict[str, float]:
        """Seconds of the stages before the second token, by this node's clock.

        ``transfer_s`` counts from when the prefill node had computed the prompt and there was room for it here.
        """
        prefill_done_at, received_at = self._received_at.pop(request.key)
        prefill_done_at = max(prefill_done_at, request.admitted_at)
        return {
            "decode_queue_s": request.admitted_at - request.arrived_at - request.waited_s,
            "prompt_wait_s": prefill_done_at - request.admitted_at,
            "transfer_s": received_at - prefill_done_at,
            "join_s": now - received_at,
        }
