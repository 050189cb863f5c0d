"""The served models."""

import time
from datetime import UTC, datetime

from fastapi import APIRouter, HTTPException
from starlette.responses import Response

from gateway.http.access.request_checks import RequestChecks
from gateway.http.json_response import JsonResponse
from gateway.http.openapi.answers import Model, ModelInfo, ModelList
from gateway.http.openapi.operations import described
from gateway.http.services import Services
from gateway.workers.served_models import ServedModel


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["models"])
    created = int(time.time())
    created_at = datetime.fromtimestamp(created, UTC).isoformat()

    def entry(model: ServedModel) -> Model:
        return Model(
            id=model.asked_name,
            object="model",
            created=created,
            owned_by="baton",
            max_model_len=model.context_length,
            root=model.name,
            parent=model.name if model.adapter else None,
            type="model",
            display_name=model.asked_name,
            created_at=created_at,
            lifecycle="active",
            max_input_tokens=model.context_length,
            max_tokens=model.context_length,
        )

    @router.get("/v1/models", **described(ModelList, summary="List the served models"))
    async def list_models() -> Response:
        adapters = dict.fromkeys(name for model in services.models for name in model.pool.registry.adapters)
        data = [entry(model) for model in (*services.models, *map(services.models.named, adapters))]
        answer = ModelList(object="list", data=data, first_id=data[0].id, last_id=data[-1].id, has_more=False)
        return JsonResponse(answer)

    @router.get("/v1/models/{name:path}", **described(Model, summary="Describe a model", errors=(503,)))
    async def get_model(name: str) -> Response:
        if not name:
            raise HTTPException(404)
        return JsonResponse(entry(services.models.named(name)))

    @router.get("/get_model_info", **described(ModelInfo, summary="Name the default model (SGLang)"))
    async def get_model_info() -> Response:
        name = services.models.default.name
        return JsonResponse(ModelInfo(model_path=name, tokenizer_path=name, is_generation=True))

    return router
