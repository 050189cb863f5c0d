"""The interface between a node process and its role, and what both roles share.

Roles are pure except for the transfer endpoint that is handed to them.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.tree_node import TokenKey, pack
from common.decision_log import DecisionLog
from common.errors import ErrorCode, RequestError, invariant
from common.finish_reason import Finish
from common.node.gateways.outbox import Outbox
from common.node.monitoring.request_stats import RequestStats
from common.node.monitoring.step_times import StepTimes
from common.request import Request, RequestKey
from common.sampling_params import MAX_TOP_LOGPROBS, SamplingParams, TokenLogprobs
from common.step_plan import StepPlan, StepResult
from common.wire.messages import (
    Decisions,
    Generate,
    GetDecisions,
    Heartbeat,
    Message,
    NodeCosts,
    PairState,
    Resume,
    Tokens,
)
from common.wire.packed_logprobs import pack_logprobs

#: Seconds after a deadline at which a node ends the request if the gateway, which does so at the deadline, has not.
DEADLINE_GRACE_S = 5.0


def check_adapter(adapter: str, loaded: Container[str]) -> None:
    """Refuse a request for a LoRA adapter that the node does not have, with a ``RequestError``."""
    if adapter and adapter not in loaded:
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, f"the node does not have the adapter {adapter} any more")


def check_generate(message: Generate, vocab_size: int, adapters: Container[str]) -> TokenKey:
    """Refuse values that would break a step. The gateway never sends them, but a node does not rely on that.

    Returns:
        The prompt in packed form.

    Raises:
        RequestError: no prompt, a token id outside of the vocabulary, a parameter out of range, an adapter that is not
            among ``adapters``, or an output that cannot be continued.
    """
    check_adapter(message.adapter, adapters)
    _check_sampling(message.sampling)
    if message.output and message.decode is None:
        raise RequestError(ErrorCode.INVALID_REQUEST, "only a decode node can continue an output")
    if len(message.output) >= message.sampling.max_new_tokens:
        raise RequestError(ErrorCode.INVALID_REQUEST, "output must be shorter than max_new_tokens")
    packed = check_tokens(message.prompt, vocab_size)
    others = (*message.output, *_token_ids(message.sampling))
    if others:
        check_tokens(others, vocab_size)
    return packed


def _check_sampling(sampling: SamplingParams) -> None:
    """Refuse parameters out of range, whatever the model, with a ``RequestError``."""
    numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    problem = ""
    if sampling.max_new_tokens < 1:
        problem = "max_new_tokens must be at least 1"
    elif not 0 <= sampling.seed < 2**64 or not all(0 <= number < math.inf for number in numbers):
        problem = "seed, temperature, top_p, min_p or repetition_penalty is out of range"
    elif sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_TOP_LOGPROBS:
        problem = f"logprobs must be at least 0 and at most {MAX_TOP_LOGPROBS}"
    elif sampling.prompt_logprobs_from is not None and sampling.prompt_logprobs_from < 1:
        problem = "prompt_logprobs_from must be at least 1: no token precedes the first"
    elif not all(sampling.bad_words):
        problem = "a bad word must not be empty"
    elif sampling.thinking is not None and not sampling.thinking.end_ids:
        problem = "thinking.end_ids must not be empty: no token would end the reasoning"
    if problem:
        raise RequestError(ErrorCode.INVALID_REQUEST, problem)


def _token_ids(sampling: SamplingParams) -> Iterator[int]:
    """The token ids that must be in the vocabulary. Those of bad words need not be."""
    yield from sampling.stop_token_ids
    yield from sampling.allowed_token_ids
    yield from (token for token, _ in sampling.logit_bias)
    if sampling.thinking is not None:
        yield from sampling.thinking.end_ids
        if sampling.thinking.start_id is not None:
            yield sampling.thinking.start_id


def check_tokens(tokens: Sequence[int], vocab_size: int) -> TokenKey:
    """Refuse an empty prompt and token ids outside of the vocabulary with a ``RequestError``.

    Returns:
        The tokens in packed form; packing is most of the work.
    """
    if not tokens:
        raise RequestError(ErrorCode.INVALID_REQUEST, "a request needs a prompt")
    try:
        packed = pack(tokens)
    except OverflowError:  # a token id is negative, or has more than 32 bits
        packed = b""
    if not packed or int(np.frombuffer(packed, np.uint32).max()) >= vocab_size:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"a token id is outside of the vocabulary of {vocab_size}")
    return packed


#: For tokens that are only computed again: what is sampled after them is discarded, and must not end them.
DISCARDED_SAMPLING = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)


def request_to_decode(message: Generate, now: float) -> Request:
    """The request of a decode node, which arrived at ``now``, with the output of earlier attempts."""
    request = _request(message, message.prompt, message.sampling, now)
    request.expected_output = message.expected_output
    request.slo_ttft_s, request.slo_itl_s = message.slo_ttft_s, message.slo_itl_s
    request.output.extend(message.output)
    request.num_earlier = len(message.output)
    return request


def request_to_prefill(message: Generate | Resume, now: float) -> Request:
    """The request of a prefill node, which arrived at ``now``.

    If tokens are computed again to continue an output elsewhere, prompt and output together are the prompt, except for
    the output's last token: the decode node computes it.
    """
    if isinstance(message, Resume):
        request = _request(message, message.prompt, DISCARDED_SAMPLING, now)
        request.is_charged = True  # when its prompt came for the first time
        return request
    if message.output:
        return _request(message, message.prompt + message.output[:-1], DISCARDED_SAMPLING, now)
    request = _request(message, message.prompt, message.sampling, now)
    request.expected_output = message.expected_output
    request.slo_ttft_s = message.slo_ttft_s
    return request


def is_recomputed(request: Request) -> bool:
    """Whether a prefill node only computes tokens again, so that the gateway gets no token and no span from it."""
    return request.sampling is DISCARDED_SAMPLING


def _request(message: Generate | Resume, prompt: tuple[int, ...], sampling: SamplingParams, now: float) -> Request:
    return Request(
        rid=message.rid,
        attempt=message.attempt,
        prompt=prompt,
        sampling=sampling,
        salt=message.cache_salt,
        adapter=message.adapter,
        priority=message.priority,
        priority_class=message.priority_class,
        tenant=message.tenant,
        arrived_at=now - message.waited_s,
        waited_s=message.waited_s,
        deadline_at=now + message.timeout_s,
    )


def first_token_message(request: Request, token: int, logprobs: TokenLogprobs | None, finish: Finish) -> Tokens:
    """The message with the first output token, from the node that computed the prompt."""
    return Tokens(
        *request.key,
        index=0,
        tokens=(token,),
        logprobs=() if logprobs is None else (pack_logprobs(logprobs),),
        finish=finish,
        cached_tokens=request.num_cached,
        prompt_logprobs=tuple(map(pack_logprobs, request.prompt_logprobs)),
    )


def decisions_message(decisions: DecisionLog, message: GetDecisions, now: float) -> Decisions:
    """The answer to ``GetDecisions``."""
    return Decisions(decisions.last(message.limit, now), message.number)


def check_pages(allocator: PageAllocator, cache: RadixCache, requests: Iterable[Request]) -> None:
    """Check allocator and cache, and that every page owned by a request is owned by one of ``requests``."""
    allocator.check()
    cache.check()
    num_own = 0
    requests = list(requests)
    if allocator.window_pages is not None:
        allocator.window_pages.check_requests(requests)
    for request in requests:
        num_own += len(request.own)
        if request.is_wrapped and request.own:
            last = request.pages[len(request.pages) - len(request.own) :]
            invariant(request.own == last, f"{request.key}'s own pages are not the end of its page table")
    invariant(allocator.count(Owner.REQUEST) == num_own, "a page is owned by an unknown request")


@dataclass(frozen=True, slots=True)
class Load:
    """How full a node is."""

    num_waiting: int
    num_running: int
    num_free_pages: int
    num_cached_pages: int
    num_quarantined_pages: int

    @classmethod
    def of(cls, requests: Mapping[RequestKey, Request], num_waiting: int, cache: RadixCache) -> "Load":
        """The load of these requests, of which ``num_waiting`` hold no pages."""
        return cls(
            num_waiting=num_waiting,
            num_running=len(requests) - num_waiting,
            num_free_pages=cache.allocator.num_free,
            num_cached_pages=cache.num_pages,
            num_quarantined_pages=cache.allocator.count(Owner.QUARANTINE),
        )


class Role(Protocol):
    """A prefill or decode role. Every call is one event; ``outbox`` holds afterwards what is to be sent."""

    outbox: Outbox
    stats: RequestStats

    def on_gateway(self, message: Message, now: float) -> None:
        """``Generate``, ``Abort`` or ``Reprioritize`` of a request; ``Flush`` or ``GetDecisions`` of the node."""
        ...

    def on_peer(self, peer: str, message: Message, now: float) -> None:
        """A message from another node, known by its incarnation."""
        ...

    def peer_lost(self, peer: str, now: float) -> None:
        """A node to which pages went, or from which they came, is out of reach."""
        ...

    def grammar_compiled(self, grammar: str, now: float) -> None:
        """A grammar that the outbox asked for is ready."""
        ...

    def grammar_failed(self, grammar: str, message: str, now: float) -> None:
        """A grammar that the outbox asked for cannot be followed: end the requests that wait for it."""
        ...

    def plan(self, now: float) -> StepPlan | None:
        """The next step, if there is anything to compute. Several may be planned before the first is committed."""
        ...

    def commit(self, result: StepResult, now: float) -> None:
        """Take in the result of a step. Steps are committed in the order in which they were planned."""
        ...

    def tick(self, now: float) -> bool:
        """Check deadlines and do some of the transfers' work. True if more of that work is waiting."""
        ...

    def stop(self, message: str, now: float, code: ErrorCode = ErrorCode.SHUTTING_DOWN) -> None:
        """End every request with this message and code: ``SHUTTING_DOWN``, or ``INTERNAL`` if the node failed."""
        ...

    def files(self) -> Sequence[Any]:
        """File descriptors that wake the loop for a ``tick`` when they are readable."""
        ...

    def transports(self) -> Sequence[str]:
        """Names of the transports for KV pages, best first."""
        ...

    def pairs(self) -> Sequence[PairState]:
        """The nodes that pages travel to or from, and the transport of each pair."""
        ...

    def peers(self) -> Sequence[str]:
        """Incarnations of the nodes that have connected to this one to receive pages."""
        ...

    def load(self) -> Load: ...

    def gauges(self) -> dict[str, float]:
        """Present values beside the load. ``gateway.metrics`` and ``common.node.monitoring.metrics`` show them."""
        ...

    def counters(self) -> dict[str, float]:
        """Monotonic totals since the start of the process."""
        ...

    def requests(self) -> Mapping[RequestKey, Request]:
        """The requests that are on this node."""
        ...

    def check(self) -> None:
        """Prove that the state of the role is consistent; raises ``InvariantError``."""
        ...


def heartbeat_of(
    role: Role,
    times: StepTimes,
    *,
    counters: Mapping[str, float],
    gauges: Mapping[str, float] | None = None,
    sent_at: float = 0.0,
) -> Heartbeat:
    """The heartbeat of a node.

    Args:
        times: of its engine's steps.
        counters, gauges: of the node, in addition to those of its role.
        sent_at: by the node's clock; 0: unknown.
    """
    load = role.load()
    totals = role.counters()
    write_s = sum(seconds for name, seconds in totals.items() if name.startswith("transfer_seconds_by_"))
    rate = totals.get("bytes_sent", 0.0) / write_s if write_s > 0 else 0.0
    return Heartbeat(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_free_pages=load.num_free_pages,
        num_cached_pages=load.num_cached_pages,
        num_quarantined_pages=load.num_quarantined_pages,
        counters={**totals, **counters},
        gauges={**role.gauges(), **(gauges or {})},
        sent_at=sent_at,
        costs=NodeCosts(times.step_s, times.prompt_token_s, rate),
    )
