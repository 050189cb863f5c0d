"""Finds requests that cannot end before their deadline, so that no node computes them in vain. Pure."""

from collections.abc import Iterable

from common.errors import ErrorCode, RequestError
from gateway.requests.admission.admission import Pace
from gateway.requests.in_flight import request_of
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPool

#: A request is refused if less than this many times the mean time of service would be left once its turn comes. Times
#: vary, and a request that is sent just in time would be served in vain about every second time.
SERVICE_MARGIN = 1.5


def refusal_by_deadline(
    pool: WorkerPool, stream: OutputStream, in_flight: Iterable[OutputStream], now: float
) -> RequestError | None:
    """The error of a new request if those ahead of it will probably take longer than its deadline allows."""
    queue, request = pool.queue, stream.request
    if (pace := pool.admission.pace(now, waiting=queue)) is None:
        return None
    left_s = request.timeout_s - (now - stream.started_at) - SERVICE_MARGIN * pace.least_s(num_expected(request))
    if len(queue) * pace.interval_s <= left_s:
        return None
    num_ahead = queue.num_ahead(request_of(stream), now, last=now + max(left_s, 0.0))
    wait_s = num_ahead * pace.interval_s
    if not num_ahead or wait_s <= left_s:
        return None
    message = (
        f"its deadline of {request.timeout_s:g} s is too early: {num_ahead} requests wait ahead of this one,"
        f" and will take about {wait_s:.1f} s; retry later, or allow more time"
    )
    retry_after_s = pool.admission.retry_after(1, now, waiting=queue, in_flight=in_flight)
    return RequestError(ErrorCode.QUEUE_FULL, message, retry_after_s=max(wait_s - left_s, retry_after_s))


def is_too_late(stream: OutputStream, pace: Pace, now: float) -> bool:
    """Whether a waiting request would not end before its deadline even at twice the speed of the latest ones."""
    left_s = stream.request.timeout_s - (now - stream.started_at)
    return left_s < pace.least_s(num_expected(stream.request)) / 2


def num_expected(request: GenerateRequest) -> int:
    """Output tokens that a request is expected to get, or may get."""
    return request.expected_output or request.sampling.max_new_tokens
