"""Starts and stops torch's profiler on all nodes, as SGLang and vLLM name it."""

from collections.abc import Sequence

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from common.errors import ErrorCode, RequestError
from common.wire.messages import ProfileAnswer, StartProfile, StopProfile
from gateway.http.access.request_checks import RequestChecks, has_body
from gateway.http.json_response import JsonResponse
from gateway.http.openapi.answers import Profile, ProfiledNode
from gateway.http.openapi.operations import described
from gateway.http.protocol.decoding import decode, refuse
from gateway.http.protocol.native import ProfileRequest
from gateway.http.services import Services
from gateway.workers.registry import Worker

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 120.0  # a node answers when its file is written


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["workers"], dependencies=[Depends(checks.admin)])

    @router.post(
        "/start_profile",
        **described(
            Profile, ProfileRequest, summary="Profile the next steps of all nodes", errors=(503, 504), needs_body=False
        ),
    )
    async def start_profile(request: Request) -> Response:
        body = decode(ProfileRequest, await checks.body(request) if has_body(request.headers) else b"{}")
        if body.output_dir is not None:
            raise refuse("leave it out: traces go to the folder of --profile-dir at each node", "output_dir")
        message = StartProfile(
            num_steps=body.num_steps,
            activities=tuple(body.activities or ("CPU", "GPU")),
            with_stack=bool(body.with_stack),
            record_shapes=bool(body.record_shapes),
        )
        return _answer(await services.control.profile(message, START_TIMEOUT_S), START_TIMEOUT_S)

    @router.post(
        "/stop_profile", **described(Profile, summary="Stop profiling, and list the traces", errors=(503, 504))
    )
    async def stop_profile() -> Response:
        return _answer(await services.control.profile(StopProfile(), STOP_TIMEOUT_S), STOP_TIMEOUT_S)

    return router


def _answer(answers: Sequence[tuple[Worker, ProfileAnswer | None]], timeout_s: float) -> Response:
    """The traces of all nodes. Raises RequestError: no node has one."""
    if not answers:
        raise RequestError(ErrorCode.NO_ROUTE, "no nodes are registered")
    late = ProfileAnswer(error=f"the node did not answer within {timeout_s:g} s")
    known = [(node, answer or late) for node, answer in answers]
    if all(answer.error for _, answer in known):
        code = ErrorCode.INVALID_REQUEST if any(answer for _, answer in answers) else ErrorCode.DEADLINE_EXCEEDED
        raise RequestError(code, "; ".join(sorted({f"{node.name}: {answer.error}" for node, answer in known})))
    nodes = [
        ProfiledNode(
            name=node.name,
            role=node.register.role,
            model=node.register.model,
            file=answer.file,
            num_steps=answer.num_steps,
            error=answer.error,
        )
        for node, answer in known
    ]
    return JsonResponse(Profile(nodes=nodes))
