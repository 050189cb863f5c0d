"""The count of a message's tokens, as Anthropic's."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.http.access.request_checks import RequestChecks
from gateway.http.errors import ANTHROPIC_PATHS, api_headers
from gateway.http.formatters.common import ignored_header
from gateway.http.http_connection import REQUEST_ID
from gateway.http.json_response import JsonResponse
from gateway.http.messages import MessagesApi
from gateway.http.openapi.answers import TokenCount
from gateway.http.openapi.operations import described
from gateway.http.protocol.anthropic import CountTokensRequest
from gateway.http.protocol.decoding import decode_with_extras
from gateway.http.services import Services


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["messages"])
    messages = MessagesApi(services.inputs)

    @router.post(
        f"{ANTHROPIC_PATHS}/count_tokens",
        **described(TokenCount, CountTokensRequest, summary="Count the tokens of a chat (Anthropic)"),
    )
    async def count_tokens(request: Request, data: Annotated[bytes, Depends(checks.body)]) -> Response:
        body, ignored = decode_with_extras(CountTokensRequest, data, are_refused=services.config.strict_fields)
        model = services.models.named(body.model)
        count = await messages.count_tokens(body, model)
        headers = api_headers(request.scope["path"], request.scope["state"][REQUEST_ID])
        return JsonResponse(TokenCount(input_tokens=count), headers=headers | ignored_header(ignored))

    return router
