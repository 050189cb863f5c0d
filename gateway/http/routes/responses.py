"""The stored responses of ``/v1/responses``."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from common.errors import ErrorCode, RequestError
from gateway.http.access.request_checks import RequestChecks
from gateway.http.formatters.common import ignored_header
from gateway.http.json_response import JsonResponse
from gateway.http.openapi.answers import InputItemList, InputTokenCount, ResponseDeleted
from gateway.http.openapi.generated import Response as StoredResponse
from gateway.http.openapi.operations import described
from gateway.http.protocol.decoding import decode_with_extras
from gateway.http.protocol.responses import ResponsesRequest
from gateway.http.responses import ResponsesApi
from gateway.http.services import Services

#: Items of one page, as in OpenAI's API, and the most that a client may ask for.
NUM_ITEMS, MAX_ITEMS = 20, 100
Limit = Annotated[int, Query(ge=1, le=MAX_ITEMS)]


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["responses"])
    store, clock = services.responses, services.clock
    api = ResponsesApi(services.inputs, store, clock, max_bytes=services.config.max_body_bytes)
    Tenant = Annotated[str, Depends(checks.tenant)]

    @router.get("/v1/responses/{response_id}", **described(StoredResponse, summary="Read a kept response (OpenAI)"))
    async def get_response(
        response_id: str, tenant: Tenant, stream: bool = False, starting_after: int | None = None
    ) -> Response:
        if stream or starting_after is not None:
            param = "stream" if stream else "starting_after"
            message = f"{param}: a kept response is not sent as a stream; leave it out"
            raise RequestError(ErrorCode.NOT_SUPPORTED, message, param=param)
        stored = store.get(tenant, response_id, clock.now())
        return Response(stored.body, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", **described(ResponseDeleted, summary="Drop a kept response (OpenAI)"))
    async def delete_response(response_id: str, tenant: Tenant) -> Response:
        store.delete(tenant, response_id, clock.now())
        return JsonResponse(ResponseDeleted(id=response_id, object="response", deleted=True))

    @router.get(
        "/v1/responses/{response_id}/input_items",
        **described(InputItemList, summary="List the input of a kept response (OpenAI)"),
    )
    async def list_input_items(
        response_id: str,
        tenant: Tenant,
        limit: Limit = NUM_ITEMS,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        items = api.input_items(tenant, response_id)
        items = items if order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise RequestError(ErrorCode.INVALID_REQUEST, "after: the response has no such item", param="after")
        first = 0 if after is None else ids.index(after) + 1
        page = items[first : first + limit]
        answer = InputItemList(
            object="list",
            data=page,
            first_id=page[0]["id"] if page else "",
            last_id=page[-1]["id"] if page else "",
            has_more=first + limit < len(items),
        )
        return JsonResponse(answer)

    @router.post(
        "/v1/responses/input_tokens",
        **described(InputTokenCount, ResponsesRequest, summary="Count the tokens of an input (OpenAI)"),
    )
    async def count_input_tokens(data: Annotated[bytes, Depends(checks.body)], tenant: Tenant) -> Response:
        body, ignored = decode_with_extras(ResponsesRequest, data, are_refused=services.config.strict_fields)
        count = await api.count_tokens(body, services.models.named(body.model), tenant)
        answer = InputTokenCount(object="response.input_tokens", input_tokens=count)
        return JsonResponse(answer, headers=ignored_header(ignored))

    @router.post("/v1/responses/{response_id}/cancel", include_in_schema=False)
    async def cancel_response(response_id: str, tenant: Tenant) -> Response:
        message = "only responses in the background can be cancelled, which this server does not make"
        raise RequestError(ErrorCode.NOT_SUPPORTED, f"{message}; close the connection instead")

    @router.post("/v1/responses/compact", include_in_schema=False)
    async def compact_response(tenant: Tenant) -> Response:
        message = "this server does not compact conversations; the field truncation with 'auto' drops the oldest turns"
        raise RequestError(ErrorCode.NOT_SUPPORTED, message)

    return router
