"""What the node process asks of a role. Roles are pure but for the transfer endpoint that is handed to them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.decision_log import Decisions as Ring
from common.errors import ErrorCode, RequestError, invariant
from common.finish_reason import Finish
from common.node.outbox import Outbox
from common.request import Request
from common.sampling_params import SamplingParams, TokenLogprobs
from common.scheduling.policies.base import Policy
from common.step_plan import StepPlan, StepResult
from common.wire.messages import Decision, Decisions, Generate, GetDecisions, Message, PairState, Resume, Tokens

#: The gateway ends a request at its deadline; a node that has not heard of it by then does so itself, a little later.
DEADLINE_GRACE_S = 5.0
#: Whoever the gateway ends so shortly before a deadline has missed it: the message may have been quicker than the one
#: that brought the request.
MISSED_S = 0.1


def check_generate(message: Generate, vocab_size: int) -> None:
    """Refuse what would break a step: the gateway never sends it, but a node does not take its word for that.

    Raises:
        RequestError: no prompt, a token id outside of the vocabulary, or a number that cannot be.
    """
    sampling = message.sampling
    if sampling.max_new_tokens < 1:
        raise RequestError(ErrorCode.INVALID_REQUEST, "a request needs room for one output token")
    numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    if not 0 <= sampling.seed < 2**64 or not all(0 <= number < math.inf for number in numbers):
        raise RequestError(ErrorCode.INVALID_REQUEST, "a sampling parameter is out of bounds")
    if sampling.prompt_logprobs_from is not None and sampling.prompt_logprobs_from < 1:
        raise RequestError(ErrorCode.INVALID_REQUEST, "the first token of a prompt follows none")
    others = (*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias))
    check_tokens((*message.prompt, *others) if message.prompt else (), vocab_size)


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError: there are none, or one is outside of the vocabulary."""
    if not tokens:
        raise RequestError(ErrorCode.INVALID_REQUEST, "a request needs a prompt")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"a token id is outside of the vocabulary of {vocab_size}")


#: What is sampled after tokens that are only computed again is thrown away, but it must not end anything.
THROWN_AWAY = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)


def resumed_request(message: Resume, now: float) -> Request:
    """The prefill scheduler's view of a ``Resume``."""
    return Request(
        rid=message.rid,
        attempt=message.attempt,
        prompt=message.prompt,
        sampling=THROWN_AWAY,
        salt=message.cache_salt,
        priority=message.priority,
        priority_class=message.priority_class,
        tenant=message.tenant,
        arrived_at=now - message.waited_s,
        waited_s=message.waited_s,
        deadline_at=now + message.timeout_s,
    )


def request_from(message: Generate, now: float) -> Request:
    """The scheduler's view of a ``Generate`` that arrived at ``now``."""
    return Request(
        rid=message.rid,
        attempt=message.attempt,
        prompt=message.prompt,
        sampling=message.sampling,
        salt=message.cache_salt,
        priority=message.priority,
        priority_class=message.priority_class,
        tenant=message.tenant,
        expected_output=message.expected_output,
        arrived_at=now - message.waited_s,
        waited_s=message.waited_s,
        deadline_at=now + message.timeout_s,
    )


def first_tokens(request: Request, token: int, logprobs: TokenLogprobs | None, finish: Finish, now: float) -> Tokens:
    """What the gateway gets from the node that computed the prompt, whichever role that node has."""
    return Tokens(
        *request.key,
        index=0,
        tokens=(token,),
        logprobs=() if logprobs is None else (logprobs,),
        finish=finish,
        cached_tokens=request.num_cached,
        prompt_logprobs=tuple(request.prompt_logprobs),
        timings={
            "prefill_queue_s": request.admitted_at - request.arrived_at - request.waited_s,
            "prefill_s": now - request.admitted_at,
        },
    )


def tell_if_missed(policy: Policy, request: Request | None, now: float) -> None:
    """A request is being ended before it is done. If that is its deadline's doing, the policy learns of it."""
    if request is not None and request.deadline_at <= now + MISSED_S:
        policy.missed(request)


def explained(decisions: Ring, message: GetDecisions, now: float) -> Decisions:
    """The answer to ``GetDecisions``."""
    return Decisions(tuple(Decision(*decided) for decided in decisions.last(message.limit, now)), message.number)


def prove_pages(books: PageAllocator, cache: RadixCache, requests: Iterable[Request]) -> None:
    """Books and cache agree with themselves, and every page that belongs to a request belongs to a known one."""
    books.check()
    cache.check()
    num_own = sum(len(request.own) for request in requests)
    invariant(books.count(Owner.REQUEST) == num_own, "a page belongs to a request that nobody knows")


@dataclass(frozen=True, slots=True)
class Load:
    """How full a role is right now."""

    num_waiting: int
    num_running: int
    num_free_pages: int
    num_cached_pages: int
    num_quarantined_pages: int


class Role(Protocol):
    """Prefill or decode. Every call is one event; what follows from it is in ``outbox`` afterwards."""

    outbox: Outbox

    def on_gateway(self, message: Message, now: float) -> None:
        """``Generate``, ``Abort`` or ``Reprioritize`` of a request; ``Flush`` or ``GetDecisions`` of the node."""
        ...

    def on_peer(self, peer: str, message: Message, now: float) -> None:
        """A message of another node, known by its incarnation."""
        ...

    def gateway_lost(self, now: float) -> None:
        """Nobody is left to answer to: end everything."""
        ...

    def peer_lost(self, peer: str, now: float) -> None: ...

    def plan(self, now: float) -> StepPlan | None:
        """The next step, if there is anything to compute. Called only when the last one has been committed."""
        ...

    def commit(self, result: StepResult, now: float) -> None: ...

    def tick(self, now: float) -> bool:
        """Deadlines, and some of the transfers' work. True if more of it is waiting right now."""
        ...

    def stop(self, message: str, now: float) -> None:
        """End every request with ``SHUTTING_DOWN`` (or what ``message`` says)."""
        ...

    def files(self) -> Sequence[Any]:
        """File descriptors whose input should wake the loop for a ``tick``."""
        ...

    def transports(self) -> Sequence[str]:
        """Names of the transports that KV pages may travel by, best first."""
        ...

    def pairs(self) -> Sequence[PairState]:
        """The nodes that pages travel to or from now, and by what."""
        ...

    def peers(self) -> Sequence[str]:
        """Incarnations that this role counts on being there."""
        ...

    def load(self) -> Load: ...

    def counters(self) -> dict[str, float]:
        """Monotonic totals since the start of the process."""
        ...

    def check(self) -> None:
        """Prove the books; raises ``InvariantError``."""
        ...
