"""The pure parts of one served model: its workers, router, admission, queue, automatic roles and advice.

Several models behind one gateway share only the two ports: a worker belongs to the model that it registers for.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.config.gateway import GatewayConfig
from common.errors import ErrorCode, RequestError
from common.plugins import load_policy
from common.scheduling.policies.factory import make_ordering
from common.wire.messages import Refused, Register, Registered
from gateway.advice.advisor import AdviceSettings, Advisor
from gateway.advice.load_meter import LoadMeter, Objectives
from gateway.requests.admission.admission import Admission
from gateway.requests.admission.request_queue import RequestQueue
from gateway.requests.attempts.retry_budget import RetryBudget
from gateway.workers.auto_roles import AutoRoles
from gateway.workers.registry import Registry, Worker
from gateway.workers.routing.router import Router

MAX_QUEUED_REQUESTS = 512


@dataclass(frozen=True, slots=True, eq=False)
class WorkerPool:
    model: str
    registry: Registry
    router: Router
    admission: Admission
    queue: RequestQueue
    budget: RetryBudget
    load_meter: LoadMeter
    advisor: Advisor
    recovery_timeout_s: float
    auto_roles: AutoRoles | None = None

    def no_route(self) -> RequestError:
        """The error while the workers cannot serve a request."""
        message = f"no {self.registry.lacking} is registered for the model {self.model!r} at present"
        return RequestError(ErrorCode.NO_ROUTE, message)


def make_pool(config: GatewayConfig, model: str, num_token_ids: int, tokenizer_digest: str = "") -> WorkerPool:
    registry = Registry(
        num_token_ids=num_token_ids,
        tokenizer_digest=tokenizer_digest,
        heartbeat_s=config.heartbeat_interval,
        lost_after_s=config.node_timeout,
        needs_prefill=config.local_prefill != "always",
        recovery_timeout_s=config.recovery_timeout,
    )
    router = Router(
        local_prefill=config.local_prefill,
        local_threshold=config.local_prefill_threshold,
        max_dispatch_ahead=config.max_dispatch_ahead,
    )
    max_queued = MAX_QUEUED_REQUESTS if config.max_queued_requests is None else config.max_queued_requests
    order = make_ordering(config, own_policy=load_policy(config.schedule_policy))
    advice = advice_settings(config)
    load_meter = LoadMeter(advice.window_s, advice.objectives)
    return WorkerPool(
        model,
        registry,
        router,
        Admission(max_queued, refuses_hopeless=config.refuse_hopeless),
        RequestQueue(order, recovery_timeout_s=config.recovery_timeout),
        RetryBudget(),
        load_meter,
        Advisor(advice, load_meter, needs_prefill=config.local_prefill != "always"),
        config.recovery_timeout,
        AutoRoles(config.auto_roles_per_hour) if config.auto_roles else None,
    )


def advice_settings(config: GatewayConfig) -> AdviceSettings:
    def seconds(milliseconds: float | None) -> float:
        return math.inf if milliseconds is None else milliseconds / 1_000

    objectives = Objectives(seconds(config.slo_ttft_ms), seconds(config.slo_itl_ms))
    return AdviceSettings(config.advice_window, config.advice_hold, config.advice_utilization, objectives)


class WorkerPools:
    def __init__(self, pools: Iterable[WorkerPool]) -> None:
        self._by_model = {pool.model: pool for pool in pools}

    def __iter__(self) -> Iterator[WorkerPool]:
        return iter(self._by_model.values())

    def __getitem__(self, model: str) -> WorkerPool:
        return self._by_model[model]

    def workers(self) -> list[Worker]:
        return [node for pool in self for node in pool.registry.workers.values()]

    def has(self, incarnation: str) -> bool:
        """Whether a worker is registered."""
        return self.of(incarnation) is not None

    def of(self, incarnation: str) -> WorkerPool | None:
        """The pool of a registered worker."""
        for pool in self._by_model.values():
            if incarnation in pool.registry.workers:
                return pool
        return None

    def register(self, incarnation: str, register: Register, now: float) -> Registered | Refused:
        """Add a worker to the pool of its model, or refuse it."""
        pool = self._by_model.get(register.model)
        if pool is None:
            served = ", ".join(repr(name) for name in self._by_model)
            return Refused(
                f"this gateway serves {served}, the node {register.name} has {register.model!r}: give the node one of "
                "these names with --served-model-name, or start the gateway with --also-serve"
            )
        return pool.registry.register(incarnation, register, now)

    def namesake(self, register: Register) -> Worker | None:
        """The registered worker with the same model and name."""
        pool = self._by_model.get(register.model)
        return None if pool is None else pool.registry.named(register.name)
