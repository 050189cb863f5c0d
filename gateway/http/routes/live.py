"""The last minute of the service, for the page at ``/``."""

from collections.abc import Iterator

from fastapi import APIRouter
from starlette.responses import Response

from common.version import VERSION
from gateway.http.access.request_checks import RequestChecks
from gateway.http.json_response import JsonResponse
from gateway.http.openapi.answers import Live, LiveModel, LiveQueue
from gateway.http.openapi.operations import described
from gateway.http.services import Services
from gateway.metrics.live import INTERVAL_S, WINDOW_S
from gateway.workers.pool import WorkerPool


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["health"])
    started_at = services.clock.now()

    @router.get("/v1/live", **described(Live, summary="The last minute in samples of a second"))
    async def live() -> Response:
        now = services.clock.now()
        answer = Live(
            version=VERSION,
            uptime_s=round(now - started_at, 3),
            interval_s=INTERVAL_S,
            window_s=WINDOW_S,
            samples=list(services.live.samples),
            queues=[queue for model in services.models for queue in _queues(model.pool, now)],
            errors=services.live.errors(),
            models=[
                LiveModel(
                    name=model.name,
                    is_ready=model.is_ready,
                    has_chat_template=model.chat_template is not None,
                    context_length=model.context_length,
                )
                for model in services.models
            ],
        )
        return JsonResponse(answer)

    return router


def _queues(pool: WorkerPool, now: float) -> Iterator[LiveQueue]:
    """The waiting requests of a model by priority class."""
    arrivals: dict[str, list[float]] = {name: [] for name in pool.queue.class_names}
    for request in pool.queue.requests():
        arrivals.setdefault(request.priority_class, []).append(request.arrived_at)
    for name, instants in arrivals.items():
        oldest_wait_s = round(now - min(instants), 3) if instants else None
        yield LiveQueue(
            model=pool.model,
            priority_class=name,
            policy=pool.queue.policy,
            waiting=len(instants),
            oldest_wait_s=oldest_wait_s,
        )
