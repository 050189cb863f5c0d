"""Requests in flight, and the caches of the nodes."""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from common.errors import ErrorCode, RequestError
from gateway.http.access import auth
from gateway.http.access.request_checks import RequestChecks
from gateway.http.json_response import JsonResponse
from gateway.http.openapi.answers import Aborted, CacheFlushed, FlushedNode, PriorityChanged
from gateway.http.openapi.operations import described
from gateway.http.protocol.decoding import decode, refuse
from gateway.http.protocol.native import AbortRequest, PriorityChange
from gateway.http.services import Services

FLUSH_TIMEOUT_S = 10.0


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["requests"])
    Caller = Annotated[auth.Caller, Depends(checks.caller)]
    Body = Annotated[bytes, Depends(checks.body)]

    @router.post("/abort_request", **described(Aborted, AbortRequest, summary="End requests in flight"))
    async def abort_request(caller: Caller, data: Body) -> Response:
        body = decode(AbortRequest, data)
        if body.abort_all == (body.rid is not None):
            raise refuse("give either rid or abort_all: true", "rid")
        if body.abort_all and not caller.tenant:
            checks.check_admin(caller)
        return JsonResponse(Aborted(aborted=services.dispatcher.abort_matching(body.rid, caller.scope)))

    @router.post(
        "/v1/requests/{rid:path}/priority",
        **described(PriorityChanged, PriorityChange, summary="Change the priority of a request in flight"),
    )
    async def change_priority(rid: str, caller: Caller, data: Body) -> Response:
        body = decode(PriorityChange, data)
        if body.priority is not None and services.priorities.has_function:
            checks.check_admin(caller)  # for others, the function has the last word
        change = services.priorities.change(body.priority, body.priority_class)
        count = services.dispatcher.reprioritize(rid, caller.scope, *change)
        if not count:
            raise RequestError(ErrorCode.NOT_FOUND, f"no request with the id {rid[:200]!r} is in flight")
        return JsonResponse(PriorityChanged(changed=count))

    @router.post(
        "/flush_cache",
        dependencies=[Depends(checks.admin)],
        **described(CacheFlushed, summary="Drop all unused cached pages", errors=(503, 504)),
    )
    async def flush_cache() -> Response:
        answers = await services.control.flush(FLUSH_TIMEOUT_S)
        late = [node.name for node, num_pages in answers if num_pages is None]
        if late:
            message = f"{', '.join(late)} did not answer within {FLUSH_TIMEOUT_S:g} s; all other caches are empty"
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, message)
        nodes = [
            FlushedNode(name=node.name, model=node.register.model, num_pages=num_pages or 0)
            for node, num_pages in answers
        ]
        return JsonResponse(CacheFlushed(num_pages=sum(node.num_pages for node in nodes), nodes=nodes))

    return router
