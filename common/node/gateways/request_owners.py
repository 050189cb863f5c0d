"""Which gateway each request of a node belongs to, and the outputs of requests whose clients may ask again. Pure.

A node answers the gateway that sent a request. When it loses that gateway, it ends the requests without a key, which no
client can ask for again. Requests with a key go on for a time as *orphans*: the client's retry may reach another
gateway, which then asks the nodes for the output so far and continues it.
"""

import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass

from common.finish_reason import Finish
from common.request import Request, RequestKey
from common.wire.messages import Failed, Generate, OtherLoad, RequestMessage, Sample, Tokens

#: Ended outputs that a node keeps at most.
MAX_KEPT = 1_024


@dataclass(slots=True)
class OwnedRequest:
    """One attempt that a gateway has sent.

    Attributes:
        gateway: incarnation of that gateway.
        digest: of the client's key; empty without one.
        request: whose output another gateway may continue; None if this node does not have the whole output.
        finish: why the output has ended.
        ended_at: None while the request is on this node.
    """

    gateway: str
    digest: str
    request: Request | None
    finish: Finish = ""
    ended_at: float | None = None

    @property
    def output(self) -> tuple[int, ...]:
        """The tokens so far; empty if they cannot be continued, as with log-probabilities, which no node keeps."""
        request = self.request
        if (
            request is None
            or request.sampling.logprobs is not None
            or request.sampling.prompt_logprobs_from is not None
        ):
            return ()
        return tuple(request.output)


class RequestOwners:
    """The gateway of each request of a node, and the outputs of requests with a key.

    Args:
        orphan_timeout_s: how long requests with a key outlive their gateway, and how long their outputs are kept after
            their end.
    """

    def __init__(self, orphan_timeout_s: float) -> None:
        self._orphan_timeout_s = orphan_timeout_s
        self._requests: dict[RequestKey, OwnedRequest] = {}
        self._keys: dict[str, RequestKey] = {}  # the latest attempt, by digest
        self._lost: dict[str, float] = {}  # gateways with orphans, and when they were lost

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    @property
    def num_orphans(self) -> int:
        return sum(owned.gateway in self._lost and owned.ended_at is None for owned in self._requests.values())

    def num_on_node(self) -> Mapping[str, int]:
        """Requests on this node by gateway, including those that have left since the last ``sweep``."""
        return Counter(owned.gateway for owned in self._requests.values() if owned.ended_at is None)

    def load_of_others(
        self, gateway: str, requests: Mapping[RequestKey, Request], most_held_tokens: int = 0
    ) -> OtherLoad:
        """What the requests of all gateways but one cost, as routers count it.

        Args:
            requests: those on this node.
            most_held_tokens: of the pool that one request holds; 0: all of its tokens.
        """
        num_to_compute = num_to_hold = 0
        for key, request in requests.items():
            owned = self._requests.get(key)
            if owned is not None and owned.gateway != gateway:
                num_to_compute += max(request.num_uncached, 0)
                num_new = request.sampling.max_new_tokens
                num_tokens = len(request.prompt) + (min(request.expected_output, num_new) or num_new)
                num_to_hold += min(num_tokens, most_held_tokens or num_tokens)
        return OtherLoad(num_to_compute, num_to_hold)

    def add(self, message: Generate, gateway: str, requests: Mapping[RequestKey, Request], *, is_whole: bool) -> None:
        """Record the requests of a message.

        Args:
            requests: those on this node.
            is_whole: this node makes the last token of the output, and has all tokens before it.
        """
        samples: tuple[Generate | Sample, ...] = (message, *message.others)
        for sample in samples:
            key = (sample.rid, sample.attempt)
            request = requests.get(key) if is_whole and sample.key else None
            self._requests[key] = OwnedRequest(gateway, sample.key, request)
            if sample.key:
                self._keys[sample.key] = key

    def owner(self, message: RequestMessage) -> str:
        """The gateway that a message is for; empty if the request is unknown.

        A request that moves to another node fails under its next attempt, which this node was never sent.
        """
        owned = self._requests.get((message.rid, message.attempt))
        if owned is None:
            return next((one.gateway for (rid, _), one in self._requests.items() if rid == message.rid), "")
        if isinstance(message, Tokens):
            owned.finish = message.finish
        elif isinstance(message, Failed):
            self.end((message.rid, message.attempt))
        return owned.gateway

    def end(self, key: RequestKey) -> None:
        """Forget a request that has failed or that its gateway has ended."""
        owned = self._requests.pop(key, None)
        if owned is not None and self._keys.get(owned.digest) == key:
            del self._keys[owned.digest]

    def drop_output(self, key: RequestKey) -> None:
        """The gateway has ended a request, and no client can ask for it; messages about it may follow."""
        owned = self._requests.get(key)
        if owned is not None and owned.digest:
            owned.request = None
            if self._keys.get(owned.digest) == key:
                del self._keys[owned.digest]

    # ---- gateways that go and come ----------------------------------------------------------------------------------

    def lose(self, gateway: str, now: float) -> list[RequestKey]:
        """A gateway is lost. Return its requests without a key, which must be ended."""
        mine = [key for key, owned in self._requests.items() if owned.gateway == gateway]
        ended = [key for key in mine if not self._requests[key].digest]
        if len(ended) < len(mine):
            self._lost[gateway] = now
        for key in ended:
            self.end(key)
        return ended

    def reclaim(self, gateway: str) -> list[RequestKey]:
        """A gateway has registered this node again, or refused it, and dropped its requests here. Return those to be
        ended."""
        self._lost.pop(gateway, None)
        running = [key for key, owned in self._requests.items() if owned.gateway == gateway and owned.ended_at is None]
        for key in running:
            self.end(key)
        return running

    def find(self, digest: str) -> tuple[RequestKey, OwnedRequest] | None:
        """The latest attempt at the request whose key has this digest."""
        key = self._keys.get(digest)
        return None if key is None else (key, self._requests[key])

    # ---- time -------------------------------------------------------------------------------------------------------

    def sweep(self, on_node: Container[RequestKey], now: float) -> list[RequestKey]:
        """Forget what is over. Return the orphans that are to be ended, since no client has asked for them in time.

        Args:
            on_node: the requests that are still on this node; no message about others will follow.
        """
        kept: list[RequestKey] = []
        overdue: list[RequestKey] = []
        for key, owned in list(self._requests.items()):
            if owned.ended_at is None and key not in on_node:
                owned.ended_at = now
            if owned.ended_at is None:
                if now - self._lost.get(owned.gateway, math.inf) >= self._orphan_timeout_s:
                    overdue.append(key)
                    self.end(key)
            elif owned.request is None or now - owned.ended_at >= self._orphan_timeout_s:
                self.end(key)
            else:
                kept.append(key)
        for key in kept[: max(0, len(kept) - MAX_KEPT)]:
            self.end(key)
        for gateway in list(self._lost):
            if not any(owned.gateway == gateway for owned in self._requests.values()):
                del self._lost[gateway]
        return overdue

    def check(self) -> None:
        """Raises AssertionError: a digest names an unknown request."""
        for digest, key in self._keys.items():
            assert self._requests[key].digest == digest
