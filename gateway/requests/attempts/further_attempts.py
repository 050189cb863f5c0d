"""Further attempts at requests whose last attempt ended without their fault.

``gateway.requests.attempts.recovery`` decides when one request is tried again; this module keeps the table of the
requests that wait for it, reads from a failure which nodes the next attempt avoids, and chooses its nodes.
"""

from collections import Counter
from collections.abc import Iterator

import msgspec

from common.errors import ErrorCode, RequestError
from common.wire.messages import Failed, Tokens
from common.wire.packed_logprobs import unpack_logprobs
from gateway.requests.attempts.recovery import GONE, AttemptEnd, Recovery
from gateway.requests.in_flight import InFlightRequest
from gateway.requests.output_processor import OutputStream, are_in_vocabulary
from gateway.workers.pool import WorkerPool
from gateway.workers.routing.candidates import NodeFilter
from gateway.workers.routing.pair_health import PairKey
from gateway.workers.routing.router import WorkerPair

#: How the last attempt ended at an output that another gateway has begun.
TAKEN_OVER = AttemptEnd(ErrorCode.TAKEN_OVER, "another gateway has begun the output")


class FurtherAttempts:
    """The requests that wait for their next attempt.

    Attributes:
        num_by_cause: further attempts since the start, by model and by the code that ended the one before.
    """

    def __init__(self) -> None:
        self.num_by_cause: Counter[tuple[str, ErrorCode]] = Counter()
        self._recovering: dict[str, InFlightRequest] = {}  # all that have had a further attempt, or wait for one
        self._waiting: dict[str, InFlightRequest] = {}
        self._looked_at = 0.0

    def recovering(self) -> list[InFlightRequest]:
        """All requests in flight of which an attempt has ended without their fault."""
        return list(self._recovering.values())

    def adopt(self, flight: InFlightRequest, now: float) -> None:
        """Let a new request whose output another gateway has begun wait for its next attempt."""
        flight.recovery = Recovery(TAKEN_OVER, now, len(flight.stream.ids))
        self._recovering[flight.stream.request.rid] = self._waiting[flight.stream.request.rid] = flight

    def attempt_ended(self, flight: InFlightRequest, end: AttemptEnd, now: float) -> float | RequestError:
        """The seconds until a request may be tried again, or the error with which it ends."""
        num_output = len(flight.stream.ids)
        if flight.recovery is None:
            flight.recovery = Recovery(end, now, num_output)
            self._recovering[flight.stream.request.rid] = flight
        flight.recovery.waits(now - flight.began_at)  # at its nodes, however long a prompt or a queue they had
        backoff_s = flight.recovery.ended(end, num_output=num_output, revision=flight.revision, now=now)
        return flight.recovery.verdict(now, timeout_s=flight.pool.recovery_timeout_s) or backoff_s

    def wait(self, flight: InFlightRequest, backoff_s: float, now: float) -> float:
        """Add a request whose nodes have been released. Return the seconds until it joins the queue: its back-off,
        or longer if the retry budget is used up."""
        pool, recovery = flight.pool, flight.recovery
        assert recovery is not None
        flight.pair, flight.failed_at = None, ""
        flight.stream.drop_early()
        budget_s = pool.budget.take(now, num_in_flight=pool.admission.num_in_flight)
        recovery.waits(budget_s)
        self.num_by_cause[pool.model, recovery.last.code] += 1
        self._waiting[flight.stream.request.rid] = flight
        return max(backoff_s, budget_s)

    def begin(self, flight: InFlightRequest, *, is_alone: bool) -> None:
        """The next attempt at a request begins; ``is_alone``: no other request is at its nodes."""
        assert flight.recovery is not None
        flight.recovery.is_alone = is_alone
        del self._waiting[flight.stream.request.rid]

    def drop(self, rid: str) -> None:
        """A request has ended, waiting or not."""
        self._waiting.pop(rid, None)
        self._recovering.pop(rid, None)

    def expired(self, now: float) -> Iterator[tuple[InFlightRequest, RequestError]]:
        """Requests that have waited longer than the recovery timeout, with their errors.

        Time in which a suspect request has nodes for itself does not count, since after losses that many requests
        shared, they take turns. Nor does time in which the nodes are only full.
        """
        since_last_s, self._looked_at = now - self._looked_at, now
        for flight in list(self._waiting.values()):
            assert flight.recovery is not None
            if flight.pool.registry.has_reserved or _waits_for_room(flight):
                flight.recovery.waits(since_last_s)
            if flight.backoff is not None:  # it has another attempt first
                continue
            lacking = _lacking(flight.pool, flight.recovery)
            error = flight.recovery.expired(now, timeout_s=flight.pool.recovery_timeout_s, lacking=lacking)
            if error is not None:
                yield flight, error


def _waits_for_room(flight: InFlightRequest) -> bool:
    """Whether a request is sent as soon as nodes that serve others have room for it."""
    pool, registry = flight.pool, flight.pool.registry
    if flight.backoff is not None or flight.queued is None or pool.queue.is_stranded(flight.queued):
        return False
    assert flight.recovery is not None
    revision, (_, decodes) = flight.recovery.revision, registry.able(flight.stream.request.adapter)
    has_nodes = registry.is_ready and any(revision in ("", node.revision) for node in decodes)
    return has_nodes and pool.router.dispatch_capacity(registry.prefills, registry.decodes) <= 0


def _lacking(pool: WorkerPool, recovery: Recovery) -> str:
    """What the next attempt at a request waits for, in words."""
    registry = pool.registry
    if not registry.is_ready:
        return registry.lacking
    if recovery.revision and all(node.revision != recovery.revision for node in registry.decodes):
        return "decode node with the weights that began the output"
    return "pair of nodes with room for it"


def end_by_failure(flight: InFlightRequest, sender: str, message: Failed, now: float) -> AttemptEnd:
    """How an attempt ended that a node has given up. The registry learns what that says about the nodes."""
    pair, registry = flight.pair, flight.pool.registry
    assert pair is not None
    cause = sender
    if message.code in (ErrorCode.NODE_LOST, ErrorCode.TRANSFER_FAILED) and pair.prefill and pair.decode:
        is_decode_lost = message.code is ErrorCode.NODE_LOST and sender == pair.prefill
        cause = pair.decode if is_decode_lost else pair.prefill
        registry.transfer_failed(PairKey(pair.prefill, pair.decode), now, is_probe=flight.is_probe)
        flight.is_probe = False
    elif message.code in GONE:
        registry.begin_drain(sender)  # its own message may come after this one
    return AttemptEnd(
        message.code,
        message.message,
        avoid=frozenset({cause}),
        decode=None if cause == pair.decode else pair.decode,
        is_loss=message.code is ErrorCode.INTERNAL,
        reported=cause if message.code is ErrorCode.NODE_LOST else "",
        began_at=flight.began_at,
    )


def wrong_output(message: Tokens, flight: InFlightRequest) -> str:
    """What a message has that no working node sends; empty if nothing is wrong.

    The log-probabilities of a prompt are only counted: there may be a hundred thousand of them.
    """
    tokens, logprobs, vocab_size = message.tokens, message.logprobs, flight.vocab_size
    request = flight.stream.request
    if not are_in_vocabulary(tokens, vocab_size):
        return f"a token id outside of the vocabulary of {vocab_size}"
    if message.index + len(tokens) > request.sampling.max_new_tokens:
        return f"more tokens than the {request.sampling.max_new_tokens} that the output may have"
    first = None if message.index else request.sampling.prompt_logprobs_from
    if len(message.prompt_logprobs) != (0 if first is None else len(request.prompt) - first):
        return "log-probabilities of another prompt"
    if not logprobs:
        return ""
    try:
        alternatives = [token for packed in logprobs for token, _ in unpack_logprobs(packed).top]
    except msgspec.DecodeError:
        return "log-probabilities that cannot be read"
    if len(logprobs) != len(tokens) or not are_in_vocabulary(alternatives, vocab_size):
        return "log-probabilities of other tokens"
    return ""


def end_by_wrong_output(flight: InFlightRequest, sender: str, wrong: str) -> AttemptEnd:
    """How an attempt ends at something that no working node sends: the node is broken, or the request breaks it."""
    pair = flight.pair
    assert pair is not None
    name = flight.stream.prefill if sender == pair.prefill else flight.stream.decode
    return AttemptEnd(
        ErrorCode.INTERNAL,
        f"node {name} sent {wrong}",
        avoid=frozenset({sender}),
        decode=None if sender == pair.decode else pair.decode,
        is_loss=True,
    )


def confirm_loss(flight: InFlightRequest, incarnation: str, alive_until: float, now: float) -> RequestError | None:
    """Record that a node is lost whose loss another node may have reported before.

    Return the error that ends the request if it may have caused the loss; None if not, or if it made progress since.
    """
    recovery = flight.recovery
    if recovery is None or recovery.has_progressed(len(flight.stream.ids)):
        return None
    is_guilty = recovery.confirms(incarnation, alive_until) and recovery.is_guilty
    return recovery.verdict(now, timeout_s=flight.pool.recovery_timeout_s) if is_guilty else None


def end_by_loss(
    flight: InFlightRequest, incarnation: str, name: str, *, is_empty: bool, alive_until: float
) -> AttemptEnd | None:
    """How an attempt ends when a node is lost; None if the attempt goes on without that node.

    A prefill node is done with a request once the decode node has sent a token, or if it left with ``is_empty``: if the
    request came after that word, its decode node reports the loss.
    """
    pair = flight.pair
    if pair is None:
        return None  # it waits for any node
    is_prefill_done = pair.decode is not None and (is_empty or flight.is_prefilled)
    is_prefill_lost = incarnation == pair.prefill and not is_prefill_done
    if not is_prefill_lost and incarnation != pair.decode:
        return None
    message = f"node {name} was lost while it worked on the request"
    return AttemptEnd(
        ErrorCode.NODE_LOST,
        message,
        decode=pair.decode if is_prefill_lost else None,
        is_seen=True,
        is_loss=flight.began_at <= alive_until,
    )


def choose_next_pair(pool: WorkerPool, stream: OutputStream, recovery: Recovery, now: float) -> WorkerPair | None:
    """The pair for a further attempt: with the decode node that has pages of it, or avoiding what ended the last one,
    or any, or a decode node alone if no prefill node can hold the output too.

    The prompt and all output tokens but the last are computed like a prompt. The last one counts as a further token,
    since its KV is written when the next one is sampled.
    """
    request, output = stream.request, stream.ids
    prefills, decodes = pool.registry.able(request.adapter)
    last = recovery.last
    among = NodeFilter(recovery.revision, prefers_idle=recovery.is_suspect)
    calm = among._replace(avoid=last.avoid)
    choices = [(calm, False)] if last.avoid else []
    if last.decode is not None:
        choices.insert(0, (calm._replace(decode=last.decode), False))
    tokens = (*request.prompt, *output[:-1])
    num_new = request.sampling.max_new_tokens - len(output) + bool(output)
    for nodes, is_local in (*choices, (among, False), (among, True)):
        pair = pool.router.choose(
            prefills, decodes, tokens, num_new=num_new, among=nodes, is_local=is_local,
            num_expected=max(request.expected_output - len(output), 0), salt=request.salt, now=now,
        )  # fmt: skip
        if pair is not None:
            return pair
    return None
