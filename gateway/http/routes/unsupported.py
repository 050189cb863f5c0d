"""Endpoints of other servers that this one refuses by name, so that clients learn why."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response

from common.errors import ErrorCode, RequestError
from gateway.http.access.request_checks import RequestChecks
from gateway.http.services import Services

PATHS = (
    "/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/classify", "/pooling",
    "/v1/moderations", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations",
    "/v1/images/generations", "/v1/images/edits", "/v1/batches", "/v1/files", "/v1/messages/batches",
)  # fmt: skip


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter()
    for path in PATHS:
        router.add_api_route(path, _refuser(path), methods=["GET", "POST"], include_in_schema=False)
    return router


def _refuser(path: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise RequestError(ErrorCode.NOT_SUPPORTED, f"{path} is not supported: this server generates text only")

    return refuse
