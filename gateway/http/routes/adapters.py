"""Loads and unloads LoRA adapters on all nodes of a model, as vLLM names it."""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from common.errors import ErrorCode, RequestError
from gateway.http.access.request_checks import RequestChecks
from gateway.http.json_response import JsonResponse
from gateway.http.openapi.answers import AdapterChanged, AdapterNode
from gateway.http.openapi.operations import described
from gateway.http.protocol.decoding import decode, refuse
from gateway.http.protocol.native import LoadLoraRequest, UnloadLoraRequest
from gateway.http.services import Services
from gateway.workers.adapter_changes import NodeErrors

LOAD_TIMEOUT_S = 120.0
UNLOAD_TIMEOUT_S = 60.0  # for the requests in flight to end


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["models"], dependencies=[Depends(checks.admin)])
    Body = Annotated[bytes, Depends(checks.body)]
    models = services.models
    changes = services.control.adapter_changes

    @router.post(
        "/v1/load_lora_adapter",
        **described(
            AdapterChanged, LoadLoraRequest, summary="Load a LoRA adapter on all nodes of a model", errors=(503, 504)
        ),
    )
    async def load_adapter(data: Body) -> Response:
        body = decode(LoadLoraRequest, data)
        if any(model.name == body.lora_name for model in models):
            raise refuse(f"a model is served as {body.lora_name!r}; give the adapter another name", "lora_name")
        model = models.base(body.base_model_name)
        for other in models:
            if other is not model and body.lora_name in other.pool.registry.adapters:
                raise refuse(f"{body.lora_name!r} is an adapter of the model {other.name!r}", "lora_name")
        errors = await changes.load(model.pool, body.lora_name, body.lora_path, LOAD_TIMEOUT_S)
        if not errors:
            raise RequestError(ErrorCode.NO_ROUTE, "no nodes are registered")
        return _answer(body.lora_name, errors)

    @router.post(
        "/v1/unload_lora_adapter",
        **described(
            AdapterChanged,
            UnloadLoraRequest,
            summary="Unload a LoRA adapter once the requests that have it have ended",
            errors=(503, 504),
        ),
    )
    async def unload_adapter(data: Body) -> Response:
        body = decode(UnloadLoraRequest, data)
        model = next((one for one in models.by_readiness if one.pool.registry.knows_adapter(body.lora_name)), None)
        if model is None:
            message = f"no node has the adapter {body.lora_name!r}"
            raise refuse(message, "lora_name", ErrorCode.MODEL_NOT_FOUND)
        return _answer(body.lora_name, await changes.unload(model.pool, body.lora_name, UNLOAD_TIMEOUT_S))

    return router


def _answer(name: str, errors: NodeErrors) -> Response:
    """What each node has done. Raises RequestError: all have refused it."""
    if errors and all(error for _, error in errors):
        message = "; ".join(dict.fromkeys(f"{node.name}: {error}" for node, error in errors))
        raise RequestError(ErrorCode.INVALID_REQUEST, message)
    nodes = [AdapterNode(name=node.name, role=node.register.role, error=error) for node, error in errors]
    return JsonResponse(AdapterChanged(lora_name=name, nodes=nodes))
