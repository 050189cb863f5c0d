"""Finds requests that cannot end before their deadline, or begin within their objective, so that no node computes them
in vain. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from common.errors import ErrorCode, RequestError
from gateway.requests.admission.admission import Pace
from gateway.requests.in_flight import request_of
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPool

#: A request is refused if less than this many times the mean time of service would be left once its turn comes. Times
#: vary, and a request that is sent just in time would be served in vain about every second time.
SERVICE_MARGIN = 1.5


class _Limit(NamedTuple):
    """How long a request may still wait for its turn, and because of which limit."""

    left_s: float
    name: str


def refusal_by_deadline(
    pool: WorkerPool, stream: OutputStream, in_flight: Iterable[OutputStream], now: float
) -> RequestError | None:
    """The error of a new request if those ahead of it will probably take longer than its limits allow."""
    queue = pool.queue
    if (pace := pool.admission.pace(now, waiting=queue)) is None:
        return None
    left_s, limit = _limit(pool, stream, pace, now)
    if len(queue) * pace.interval_s <= left_s:
        return None
    num_ahead = queue.num_ahead(request_of(stream), now, last=now + max(left_s, 0.0))
    wait_s = num_ahead * pace.interval_s
    if not num_ahead or wait_s <= left_s:
        return None
    message = (
        f"its {limit} is too early: {num_ahead} requests wait ahead of this one,"
        f" and will take about {wait_s:.1f} s; retry later, or allow more time"
    )
    retry_after_s = pool.admission.retry_after(1, now, waiting=queue, in_flight=in_flight)
    return RequestError(ErrorCode.QUEUE_FULL, message, retry_after_s=max(wait_s - left_s, retry_after_s))


def _limit(pool: WorkerPool, stream: OutputStream, pace: Pace, now: float) -> _Limit:
    """The limit that a new request reaches first: its deadline, or the objective for its first token."""
    request, waited_s = stream.request, now - stream.started_at
    service_s = SERVICE_MARGIN * pace.least_s(_num_left(stream))
    limits = [_Limit(request.timeout_s - waited_s - service_s, f"deadline of {request.timeout_s:g} s")]
    if pool.admission.refuses_hopeless and request.slo_ttft_s:
        limits.append(_Limit(request.slo_ttft_s - waited_s, f"slo_ttft_ms of {request.slo_ttft_s * 1_000:g}"))
    return min(limits)


def reason_of_lateness(pool: WorkerPool, stream: OutputStream, pace: Pace | None, now: float) -> str:
    """Why a waiting request is not sent any more; empty if it still can be in time.

    It would not end before its deadline even at twice the speed of the latest ones, or its objective has passed.
    """
    request, waited_s = stream.request, now - stream.started_at
    if pace is not None and request.timeout_s - waited_s < pace.least_s(_num_left(stream)) / 2:
        return f"there is too little time left before its deadline of {request.timeout_s:g} s"
    is_bound = pool.admission.refuses_hopeless and request.slo_ttft_s and not stream.ids
    if is_bound and waited_s > request.slo_ttft_s:
        return f"its slo_ttft_ms of {request.slo_ttft_s * 1_000:g} passed while it waited (--refuse-hopeless)"
    return ""


def _num_left(stream: OutputStream) -> int:
    """Output tokens that a request is expected to get, or may get, beside those that it has."""
    request = stream.request
    return max((request.expected_output or request.sampling.max_new_tokens) - len(stream.ids), 1)
