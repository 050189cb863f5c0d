"""Endpoints of other servers that this one refuses by name, so that clients learn why."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response

from common.errors import ErrorCode, RequestError
from gateway.http.access.request_checks import RequestChecks
from gateway.http.services import Services

#: Each with all paths below it.
PATHS = (
    "/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/classify", "/pooling",
    "/v1/moderations", "/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime", "/v1/batches", "/v1/files",
    "/v1/uploads", "/v1/vector_stores", "/v1/conversations", "/v1/assistants", "/v1/threads", "/v1/fine_tuning",
    "/v1/messages/batches",
)  # fmt: skip


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter()
    for path in PATHS:
        for route in (path, f"{path}/{{rest:path}}"):
            router.add_api_route(route, _refuser(path), methods=["GET", "POST", "DELETE"], include_in_schema=False)
    return router


def _refuser(path: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise RequestError(ErrorCode.NOT_SUPPORTED, f"{path} is not supported: this server generates text only")

    return refuse
