"""The nodes, their roles, and the decisions of their schedulers."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from common.decision_log import MAX_DECISIONS
from common.errors import ErrorCode, RequestError
from gateway.http.access.request_checks import RequestChecks, has_body
from gateway.http.json_response import JsonResponse
from gateway.http.openapi import answers
from gateway.http.openapi.answers import DecisionList, Draining, FailedPair, RoleChanged, ScrapeTarget, WorkerList
from gateway.http.openapi.operations import described
from gateway.http.protocol.decoding import decode
from gateway.http.protocol.native import DrainRequest, RoleChange
from gateway.http.services import Services
from gateway.workers.registry import Registry, Worker

ANSWER_TIMEOUT_S = 5.0
#: ``/v1/workers/gateway/decisions`` returns the gateway's own decisions.
OWN_DECISIONS = "gateway"
DECISIONS = 100

#: Nodes that one answer lists, and pairs up to which it shows also those that work.
MAX_LISTED, MAX_PAIRS = 2_000, 10_000

Limit = Annotated[int, Query(ge=1, le=MAX_DECISIONS)]
Listed = Annotated[int, Query(ge=1, le=MAX_LISTED)]
Offset = Annotated[int, Query(ge=0)]


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["workers"])
    Body = Annotated[bytes, Depends(checks.body)]

    def named(name: str) -> Worker:
        """The node of this name or incarnation. Raises RequestError: there is none."""
        for node in services.control.pools.workers():
            if name in (node.incarnation, node.name):
                return node
        raise RequestError(ErrorCode.NOT_FOUND, f"no node has the name or the incarnation {name[:200]!r}")

    @router.get("/v1/workers", **described(WorkerList, summary="List the nodes"))
    async def list_workers(limit: Listed = MAX_LISTED, offset: Offset = 0) -> Response:
        models = services.models
        workers = [
            node for pool in services.control.pools for node in sorted(pool.registry.workers.values(), key=_place)
        ]
        listed = workers[offset : offset + limit]
        has_all_pairs = sum([len(node.pairs) for node in listed]) <= MAX_PAIRS
        answer = WorkerList(
            workers=[_worker(services, node, has_all_pairs=has_all_pairs) for node in listed],
            num_workers=len(workers),
            num_in_flight=services.dispatcher.num_in_flight,
            num_waiting=sum(len(model.pool.queue) for model in models),
            model=models.default.name,
            models=[model.name for model in models],
            is_ready=models.is_ready,
        )
        return JsonResponse(answer)

    @router.get(
        "/v1/workers/targets",
        **described(ScrapeTarget, is_list=True, summary="List the nodes' own metrics, for Prometheus' http_sd_configs"),
    )
    async def list_targets() -> Response:
        registers = [node.register for node in services.control.pools.workers()]
        return JsonResponse(
            [
                ScrapeTarget([one.http_address], {"node": one.name, "role": one.role, "model": one.model})
                for one in registers
                if one.http_address
            ]
        )

    @router.get(
        "/v1/workers/{name:path}/decisions",
        **described(DecisionList, summary="List the last decisions of a node, or of the gateway", errors=(504,)),
    )
    async def list_decisions(name: str, limit: Limit = DECISIONS) -> Response:
        if name == OWN_DECISIONS:
            own = services.dispatcher.decisions.last(limit, services.clock.now())
            return JsonResponse(DecisionList(worker=name, decisions=own))
        node = named(name)
        decisions = await services.control.decisions(node, limit, ANSWER_TIMEOUT_S)
        if decisions is None:
            message = f"the node {node.name} did not answer within {ANSWER_TIMEOUT_S:g} s"
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, message)
        return JsonResponse(DecisionList(worker=node.name, decisions=decisions))

    @router.post(
        "/v1/workers/{name:path}/drain",
        dependencies=[Depends(checks.admin)],
        **described(
            Draining,
            DrainRequest,
            summary="Let a node finish or move its requests, and stop it",
            errors=(503, 504),
            needs_body=False,
        ),
    )
    async def drain(name: str, request: Request) -> Response:
        body = decode(DrainRequest, await checks.body(request) if has_body(request.headers) else b"{}")
        node = named(name)
        num_requests = services.dispatcher.num_at(node.incarnation)
        if not await services.control.drain(node, body.timeout_s, ANSWER_TIMEOUT_S):
            message = f"the node {node.name} did not answer within {ANSWER_TIMEOUT_S:g} s"
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, message)
        answer = Draining(worker=node.name, is_draining=True, num_requests=num_requests, timeout_s=body.timeout_s)
        return JsonResponse(answer)

    @router.post(
        "/v1/workers/{name:path}/role",
        dependencies=[Depends(checks.admin)],
        **described(
            RoleChanged,
            RoleChange,
            summary="Make a decode node a prefill node, or the reverse, with its model and its cache",
            errors=(504,),
        ),
    )
    async def change_role(name: str, data: Body) -> Response:
        body, begun_at = decode(RoleChange, data), services.clock.now()
        node = await services.control.role_changes.change(named(name), body.role, body.timeout_s, is_forced=body.force)
        answer = RoleChanged(
            name=node.name,
            role=node.register.role,
            incarnation=node.incarnation,
            num_role_changes=node.register.num_role_changes,
            seconds=round(services.clock.now() - begun_at, 3),
        )
        return JsonResponse(answer)

    return router


def _place(node: Worker) -> tuple[bool, str, str]:
    """Where a node stands among those of its model: the gateways of a group list the same nodes in one part."""
    return node.register.role == "decode", node.name, node.incarnation


def _worker(services: Services, node: Worker, *, has_all_pairs: bool) -> answers.Worker:
    """A node as it is listed, with all of its pairs or only with those that do not work."""
    register, now = node.register, services.clock.now()
    pool = services.control.pools[register.model]
    return answers.Worker(
        name=node.name,
        role=register.role,
        model=register.model,
        http_address=register.http_address,
        incarnation=node.incarnation,
        starts=node.starts,
        revision=node.revision,
        num_role_changes=register.num_role_changes,
        is_draining=node.is_draining,
        is_reserved=node.is_reserved,
        num_requests=services.dispatcher.num_at(node.incarnation),
        seen_s_ago=round(now - node.seen_at, 3),
        load_tokens=pool.router.load(node.incarnation),
        register=register,
        heartbeat=node.heartbeat,
        num_pairs=len(node.pairs),
        pairs=[pair for pair in node.pairs if has_all_pairs or pair.problem],
        failed_pairs=_failed_pairs(pool.registry, node.incarnation, now),
    )


def _failed_pairs(registry: Registry, incarnation: str, now: float) -> list[FailedPair]:
    """The pairs of a node whose transfers have failed lately."""
    return [
        FailedPair(
            peer=registry.workers[pair.decode if pair.prefill == incarnation else pair.prefill].name,
            state=breaker.state,
            num_failures=breaker.num_failures,
            probe_in_s=round(max(breaker.until - now, 0.0), 3) if breaker.state == "open" else None,
        )
        for pair, breaker in registry.health.breakers.items()
        if incarnation in pair
    ]
