"""One served model's nodes: who they are, who serves which request, how many may be in flight. Pure.

Several models behind one gateway share nothing but the two ports: a node belongs to the model that it names when it
registers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.config.gateway import GatewayConfig
from common.errors import ErrorCode, RequestError
from common.plugins import load_policy
from common.scheduling.policies.factory import make_ordering
from common.wire.messages import Refused, Register, Registered
from gateway.requests.admission import Admission
from gateway.requests.output_processor import GenerateRequest
from gateway.requests.request_queue import RequestQueue
from gateway.workers.registry import Limits, Node, Registry
from gateway.workers.router import Pair, Router, can_pair

MAX_QUEUED_REQUESTS = 512


@dataclass(frozen=True, slots=True, eq=False)
class WorkerPool:
    """The nodes of one model, by the name under which it is served."""

    model: str
    registry: Registry
    router: Router
    admission: Admission
    backlog: RequestQueue
    lookahead: int  # see Routing.gateway_lookahead

    def limits(self) -> Limits:
        """What the nodes can do for one request. Raises RequestError while nobody can serve one."""
        limits = self.registry.limits()
        if limits is None:
            message = f"no {self.registry.lacking} is registered for the model {self.model!r} at present"
            raise RequestError(ErrorCode.NO_ROUTE, message)
        return limits

    def choose(self, ask: GenerateRequest, *, siblings: Pair | None) -> Pair | None:
        """The nodes for one output: those of its siblings, other samples of the same prompt, if it has any.

        None if no pair that can exchange pages has pools that are large enough.
        """
        num_new, num_expected = ask.sampling.max_new_tokens, ask.expected_output
        prefills, decodes = self.registry.able("prefill"), self.registry.able("decode")
        if siblings is not None:
            able = {node.incarnation: node for node in (*prefills, *decodes)}
            nodes = [able[incarnation] for incarnation in siblings.nodes if incarnation in able]
            if len(nodes) == len(siblings.nodes) and (len(nodes) == 1 or can_pair(nodes[0], nodes[1])):
                return self.router.again(siblings, num_new=num_new, num_expected=num_expected)
        return self.router.choose(
            prefills, decodes, ask.prompt, num_new=num_new, num_expected=num_expected, salt=ask.salt
        )

    def credit(self) -> int:
        """Requests that may go out now: what the decode nodes run at once and, so that those that compute prompts do
        not run dry, some more for each of these. Below zero if nodes have gone."""
        limits = self.registry.limits()
        if limits is None:
            return 0
        decodes = self.registry.able("decode")
        num_computing = len(self.registry.able("prefill")) or len(decodes)
        room = limits.max_running + self.lookahead * num_computing
        for node in decodes:
            room -= self.router.num_requests(node.incarnation)
        return room


def make_fleet(config: GatewayConfig, model: str, num_token_ids: int) -> WorkerPool:
    """The pure parts of one served model, as the configuration wants them.

    Args:
        num_token_ids: of the gateway's tokenizer; nodes know at least as many.
    """
    registry = Registry(
        model=model,
        num_token_ids=num_token_ids,
        heartbeat_s=config.heartbeat_interval,
        lost_after_s=config.heartbeat_timeout,
        needs_prefill=config.local_prefill != "always",
    )
    router = Router(local_prefill=config.local_prefill, local_threshold=config.local_prefill_threshold)
    queued = MAX_QUEUED_REQUESTS if config.max_queued_requests is None else config.max_queued_requests
    backlog = RequestQueue(
        make_ordering(config, own_policy=load_policy(config.schedule_policy)), patience_s=config.heartbeat_timeout
    )
    return WorkerPool(model, registry, router, Admission(queued), backlog, config.gateway_lookahead)


class WorkerPools:
    """All models and their nodes.

    Args:
        fleets: one for each model; the first serves requests that name none.
    """

    def __init__(self, fleets: Iterable[WorkerPool]) -> None:
        self._by_model = {fleet.model: fleet for fleet in fleets}

    def __iter__(self) -> Iterator[WorkerPool]:
        return iter(self._by_model.values())

    def __getitem__(self, model: str) -> WorkerPool:
        return self._by_model[model]

    def nodes(self) -> list[Node]:
        """Every registered node."""
        return [node for fleet in self for node in fleet.registry.nodes.values()]

    def of(self, incarnation: str) -> WorkerPool | None:
        """The fleet of a registered node."""
        return next((fleet for fleet in self if incarnation in fleet.registry.nodes), None)

    def register(self, incarnation: str, register: Register, now: float) -> Registered | Refused:
        """A node introduces itself, for the first time or again; its model decides where it belongs."""
        fleet = self._by_model.get(register.model)
        if fleet is None:
            served = ", ".join(repr(name) for name in self._by_model)
            return Refused(f"this gateway serves {served}, the node {register.name} has {register.model!r}")
        return fleet.registry.register(incarnation, register, now)

    def namesake(self, register: Register) -> Node | None:
        """The present node of this model and name."""
        fleet = self._by_model.get(register.model)
        return None if fleet is None else fleet.registry.named(register.name)
