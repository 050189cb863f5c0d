"""Output tokens on their way from a decode node to the gateway, in messages of so many each."""

from collections import Counter

from common.node.outbox import Outbox
from common.node.role import first_tokens
from common.request import Request
from common.wire.messages import Tokens
from decode_node.request_table import Key
from decode_node.scheduler import Sampled


class TokenOutput:
    """Args:
    outbox: takes the messages.
    stream_interval: output tokens per message, after the first token.
    totals: ``local_prefills`` and ``prompt_tokens_cached`` are counted there.
    """

    def __init__(self, outbox: Outbox, stream_interval: int, totals: Counter[str]) -> None:
        self._outbox = outbox
        self._stream_interval = stream_interval
        self._totals = totals
        self._unsent: dict[Key, list[Sampled]] = {}  # tokens that wait to fill a message
        self._received_at: dict[Key, tuple[float, float]] = {}  # the handoff, and the last of the pages

    def received(self, key: Key, *, handed_at: float, received_at: float) -> None:
        """The request's prompt has come; to be told with its next token."""
        self._received_at[key] = (handed_at, received_at)

    def add(self, sampled: Sampled, now: float) -> None:
        """One more token: told at once if it is the first or the last, else when a message is full."""
        request, finish = sampled.request, sampled.finish
        num_output = len(request.output)
        if num_output == 1:
            self._tell_first(sampled, now)
        elif self._stream_interval == 1:
            if num_output > 2 and not finish and sampled.logprobs is None:  # what most tokens are
                self._outbox.gateway.append(Tokens(request.rid, request.attempt, num_output - 1, (sampled.token,)))
            else:
                self._tell([sampled], now)
        else:
            unsent = self._unsent.setdefault(request.key, [])
            unsent.append(sampled)
            if finish or len(unsent) >= self._stream_interval:
                self.flush(request, now)

    def flush(self, request: Request, now: float) -> None:
        """Tell what waits to fill a message."""
        unsent = self._unsent.pop(request.key, None)
        if unsent:
            self._tell(unsent, now)

    def forget(self, key: Key) -> None:
        """The request is over, or nobody wants to hear of it."""
        self._unsent.pop(key, None)
        self._received_at.pop(key, None)

    def _tell_first(self, sampled: Sampled, now: float) -> None:
        """The first token of a prompt that was computed here."""
        request = sampled.request
        self._totals["local_prefills"] += 1
        self._totals["prompt_tokens_cached"] += request.num_cached
        self._outbox.gateway.append(first_tokens(request, sampled.token, sampled.logprobs, sampled.finish, now))

    def _tell(self, unsent: list[Sampled], now: float) -> None:
        """The last tokens of a request."""
        request, token, logprobs, finish = unsent[-1]
        rid, attempt = request.key
        index = len(request.output) - len(unsent)
        tokens = (token,) if len(unsent) == 1 else tuple([sampled.token for sampled in unsent])
        judged = () if logprobs is None else tuple([sampled.logprobs for sampled in unsent])
        timings = self._timings(request, now) if index == 1 and request.key in self._received_at else {}
        self._outbox.gateway.append(
            Tokens(rid, attempt, index, tokens, logprobs=judged, finish=finish, timings=timings)
        )

    def _timings(self, request: Request, now: float) -> dict[str, float]:
        """Of the way to the second token, stage after stage, by this node's clock. ``transfer_s`` is what the pages
        took once the prefill node had computed all of them and said so, and there was room for all of them here."""
        handed_at, received_at = self._received_at.pop(request.key)
        handed_at = max(handed_at, request.admitted_at)
        return {
            "decode_queue_s": request.admitted_at - request.arrived_at - request.waited_s,
            "prompt_wait_s": handed_at - request.admitted_at,
            "transfer_s": received_at - handed_at,
            "join_s": now - received_at,
        }
