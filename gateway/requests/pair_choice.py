"""Chooses the nodes of an attempt: its first pair, or the pair with which an output goes on."""

from common.errors import ErrorCode
from gateway.requests.attempts.recovery import AttemptEnd, Recovery
from gateway.requests.in_flight import InFlightRequest
from gateway.workers.routing.candidates import Among
from gateway.workers.routing.router import WorkerPair

#: How the last attempt ended at an output that another gateway has begun.
TAKEN_OVER = AttemptEnd(ErrorCode.TAKEN_OVER, "another gateway has begun the output")


def choose_pair(flight: InFlightRequest, now: float) -> WorkerPair | None:
    """The pair for the next attempt at a request, counted as sent to it; None if no page pool is large enough."""
    if flight.recovery is None and not flight.stream.ids:
        return _first_pair(flight, now)
    return _next_pair(flight, now)


def _first_pair(flight: InFlightRequest, now: float) -> WorkerPair | None:
    """The pair of another sample of the same prompt if there is one, or the best pair."""
    pool, request = flight.pool, flight.stream.request
    prefills, decodes = pool.registry.able(request.adapter)
    num_new, num_expected = request.sampling.max_new_tokens, request.expected_output
    sibling = flight.siblings.get(request.prompt_number)
    if sibling is not None:
        pair = pool.router.choose_again(sibling, prefills, decodes, num_new=num_new, num_expected=num_expected)
        if pair is not None:
            return pair
    return pool.router.choose(
        prefills, decodes, request.prompt,
        num_new=num_new, num_expected=num_expected, salt=request.salt, now=now,
    )  # fmt: skip


def _next_pair(flight: InFlightRequest, now: float) -> WorkerPair | None:
    """The pair with the decode node that has pages of the request, or one that avoids what ended the last attempt, or
    any, or a decode node alone if no prefill node can hold the output too.

    The prompt and all output tokens but the last are computed like a prompt, and the last one leads to the next, so
    that there is one more to come than the client still gets.
    """
    pool, request, output = flight.pool, flight.stream.request, flight.stream.ids
    recovery = flight.recovery or Recovery(TAKEN_OVER, 0.0, len(output))
    prefills, decodes = pool.registry.able(request.adapter)
    last = recovery.last
    among = Among(recovery.revision, prefers_idle=recovery.is_suspect)
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
