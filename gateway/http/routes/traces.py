"""The last requests, where each spent its time, and a window of time as a trace."""

import asyncio
import math
import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from common.errors import ErrorCode, RequestError
from gateway.http.access.auth import Caller
from gateway.http.access.request_checks import RequestChecks
from gateway.http.json_response import JsonResponse
from gateway.http.openapi.answers import (
    ChromeTrace,
    NodeClock,
    RequestList,
    RequestSpan,
    RequestSummary,
    RequestTimeline,
)
from gateway.http.openapi.operations import described
from gateway.http.services import Services
from gateway.tracing.chrome_trace import chrome_trace
from gateway.tracing.timelines import Timeline

REQUESTS, MAX_REQUESTS = 50, 1_000
SECONDS, MAX_SECONDS = 10.0, 3_600.0
#: Outputs in one trace: the newest.
MAX_TRACED = 2_000

Limit = Annotated[int, Query(ge=1, le=MAX_REQUESTS)]
Seconds = Annotated[float, Query(gt=0, le=MAX_SECONDS)]


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["requests"])
    KnownCaller = Annotated[Caller, Depends(checks.caller)]
    timelines, clock = services.timelines, services.clock
    one_at_a_time = asyncio.Lock()  # a trace takes up to a second of the interpreter's time

    @router.get("/v1/requests", **described(RequestList, summary="List the last requests, newest first"))
    async def list_requests(caller: KnownCaller, limit: Limit = REQUESTS) -> Response:
        now, unix_now = clock.now(), time.time()
        newest = timelines.last(limit, caller.scope)
        return JsonResponse(RequestList(requests=[_summary(one, now, unix_now) for one in newest]))

    @router.get(
        "/v1/requests/{rid:path}/timeline",
        **described(RequestTimeline, summary="Where a request spent its time"),
    )
    async def show_timeline(rid: str, caller: KnownCaller) -> Response:
        found = timelines.find(rid, caller.scope)
        if found is None:
            message = f"no running request and none of the last requests (--timeline-requests) has the id {rid[:200]!r}"
            raise RequestError(ErrorCode.NOT_FOUND, message)
        return JsonResponse(_waterfall(found, clock.now(), time.time()))

    @router.get("/v1/trace", **described(ChromeTrace, summary="The last seconds, as a trace for ui.perfetto.dev"))
    async def show_trace(caller: KnownCaller, seconds: Seconds = SECONDS) -> Response:
        async with one_at_a_time:
            now = clock.now()
            shown = timelines.since(now - seconds, MAX_TRACED, caller.scope)
            return await run_in_threadpool(lambda: JsonResponse(chrome_trace(shown, now)))

    return router


def _summary(timeline: Timeline, now: float, unix_now: float) -> RequestSummary:
    return RequestSummary(
        rid=timeline.rid,
        model=timeline.model,
        status=timeline.status,
        started_at=unix_now - (now - timeline.started_at),
        duration_s=timeline.end_at(now) - timeline.started_at,
        ttft_s=timeline.first_at - timeline.started_at if timeline.first_at else None,
        prompt_tokens=timeline.prompt_tokens,
        cached_tokens=timeline.cached_tokens,
        output_tokens=timeline.output_tokens,
        num_attempts=timeline.num_attempts,
        prefill=timeline.prefill or None,
        decode=timeline.decode or None,
    )


def _waterfall(timeline: Timeline, now: float, unix_now: float) -> RequestTimeline:
    clocks = {
        name: NodeClock(offset_s=clock.offset_s, error_s=clock.error_s if math.isfinite(clock.error_s) else None)
        for name, clock in timeline.clocks(now).items()
    }
    spans = [
        RequestSpan(
            name=span.name,
            process=span.process,
            start_s=span.start_at - timeline.started_at,
            duration_s=span.duration_s,
            attributes=dict(span.attributes),
        )
        for span in timeline.spans(now)
    ]
    return RequestTimeline(
        rid=timeline.rid,
        trace_id=timeline.trace_id,
        started_at=unix_now - (now - timeline.started_at),
        duration_s=timeline.end_at(now) - timeline.started_at,
        status=timeline.status,
        num_attempts=timeline.num_attempts,
        prefill=timeline.prefill or None,
        decode=timeline.decode or None,
        clocks=clocks,
        spans=spans,
    )
