"""Health, readiness, metrics and configuration."""

import dataclasses

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from common.config.gateway import GatewayConfig
from common.config.options import options_of
from common.version import VERSION
from gateway.http.access.request_checks import RequestChecks
from gateway.http.json_response import JsonResponse
from gateway.http.openapi.answers import Health, ModelState, Ready, ServerInfo
from gateway.http.openapi.operations import described
from gateway.http.services import Services


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["health"])
    started_at = services.clock.now()

    @router.get("/health", **described(Health, summary="Whether the gateway runs"))
    async def health() -> Response:
        return JsonResponse(Health(status="ok"))

    @router.get("/ready", **described(Ready, summary="Whether a request can be served", errors=(503,)))
    async def ready() -> Response:
        are_ready = {model.name: model.is_ready for model in services.models}
        if not any(are_ready.values()):
            raise services.models.default.pool.no_route()
        return JsonResponse(Ready(status="ready", models=are_ready))

    @router.get("/metrics", response_class=PlainTextResponse, summary="Metrics for Prometheus")
    async def metrics() -> Response:
        return Response(services.metrics.text(), headers={"content-type": services.metrics.content_type})

    @router.get("/server_info", **described(ServerInfo, summary="Version, limits and configuration"))
    async def server_info() -> Response:
        known = options_of(GatewayConfig)
        values = dataclasses.asdict(services.config)
        config = {key: value for key, value in values.items() if key not in known or not known[key].is_secret}
        default = services.models.default
        models = {
            model.name: ModelState(is_ready=model.is_ready, limits=model.pool.registry.limits)
            for model in services.models
        }
        answer = ServerInfo(
            version=VERSION,
            model=default.name,
            uptime_s=round(services.clock.now() - started_at, 3),
            num_in_flight=services.dispatcher.num_in_flight,
            is_ready=services.models.is_ready,
            control_address=services.control.address,
            limits=default.pool.registry.limits,
            models=models,
            config=config,
        )
        return JsonResponse(answer)

    return router
