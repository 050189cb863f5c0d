"""How many nodes of each role the present load needs."""

import math

from fastapi import APIRouter
from starlette.responses import Response

from gateway.advice.advisor import RoleAdvice
from gateway.http.access.request_checks import RequestChecks
from gateway.http.json_response import JsonResponse
from gateway.http.openapi.answers import Advice, AdvisedModel, AdvisedRole, MeasuredLoad
from gateway.http.openapi.operations import described
from gateway.http.services import Services
from gateway.workers.pool import WorkerPool


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["workers"])
    config = services.config

    @router.get("/v1/advice", **described(Advice, summary="How many nodes of each role the load needs, and why"))
    async def advise() -> Response:
        answer = Advice(
            hold_s=config.advice_hold,
            utilization=config.advice_utilization,
            models=[_model(model.pool) for model in services.models],
        )
        return JsonResponse(answer)

    return router


def _model(pool: WorkerPool) -> AdvisedModel:
    advice = pool.advisor.advice
    load, objectives = advice.load, advice.objectives
    return AdvisedModel(
        model=pool.model,
        window_s=round(advice.window_s, 3),
        load=MeasuredLoad(
            requests_per_s=round(load.requests, 3),
            prompt_tokens_per_s=round(load.prompt_tokens, 1),
            output_tokens_per_s=round(load.output_tokens, 1),
        ),
        slo_ttft_ms=_milliseconds(objectives.ttft_s),
        slo_itl_ms=_milliseconds(objectives.itl_s),
        roles=[_role(role) for role in advice.roles],
    )


def _role(role: RoleAdvice) -> AdvisedRole:
    return AdvisedRole(
        role=role.role,
        nodes=role.num_nodes,
        advised=role.advised,
        needed=role.needed,
        work=round(role.work, 3),
        busy_share=round(role.busy_share, 3),
        reason=role.reason,
    )


def _milliseconds(seconds: float) -> float | None:
    return None if math.isinf(seconds) else round(seconds * 1_000, 3)
