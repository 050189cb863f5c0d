"""One simulation: a service of nodes in virtual time, and the clients that send it a planned load."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.plugins import load_priority_function
from gateway.requests.admission.priority import PriorityResolver
from gateway.requests.admission.priority_review import INTERVAL_S, PriorityReview
from scripts.load_tester.workload.plan import Plan
from scripts.simulator.client import Client, PlannedTokens
from scripts.simulator.config import SimulateConfig
from scripts.simulator.faults import FaultInjector
from scripts.simulator.report import Figures, Objectives, figures
from scripts.simulator.service.cluster import Cluster
from scripts.simulator.service.engine import END_TOKEN, EmptyPageStore, ScriptedEngine
from scripts.simulator.service.gateway import Answer
from scripts.simulator.service.node import MODEL, NodeSettings

VOCAB_SIZE = 32_000
LOOK_EVERY = 2_000  # events


class Simulation:
    """A service and its clients.

    Args:
        is_stepwise: every step is taken by itself, which is slower. The results are the same.
    """

    def __init__(self, config: SimulateConfig, plan: Plan, *, is_stepwise: bool = False) -> None:
        self._config = config
        self._script = script = PlannedTokens(config.seed, VOCAB_SIZE)
        layout = config.layout
        settings = NodeSettings(
            config.node,
            config.capacities,
            lambda given: ScriptedEngine(EmptyPageStore(layout, given.num_pages), script.answer, given.num_slots),
            config.costs,
            {role: found.costs for role, found in config.node_models.items()},
            vocab_size=VOCAB_SIZE,
            context_length=config.max_context,
            eos_token_ids=(END_TOKEN,),
            takes_steps_together=not (
                is_stepwise or config.check or config.faults or config.auto_roles or config.cores
            ),
            num_cores=config.cores,
            costs_beside=config.costs_beside,
            costs_beside_decode=config.costs_beside_decode,
            spread=config.spread,
        )
        self.cluster = Cluster(
            settings, config.pool(MODEL), num_prefill=config.prefill, num_decode=config.decode, on_end=self._on_end
        )
        priorities = PriorityResolver(config, load_priority_function(config.priority_function))
        self._review = PriorityReview(priorities, self.cluster.gateway.dispatcher)
        if priorities.has_function:
            self.cluster.events.background_after(INTERVAL_S, self._ask_again)
        self.client = Client(
            plan,
            script,
            self.cluster.events,
            self.cluster.gateway.submit,
            priorities=priorities,
            classes=config.class_weights,
            max_new_tokens=config.max_new_tokens,
            timeout_s=config.request_timeout,
            slos=config.slos,
            concurrency=config.concurrency or 0,
        )
        self._goals = Objectives(config.slos, plan.classes, config.slo_attainment, config.starvation_bound)
        self._faults = FaultInjector(self.cluster, config.fault_options) if config.faults else None
        self._num_wrong = 0
        self.is_stopped = False

    def _on_end(self, answer: Answer) -> None:
        if self._faults is not None:
            self._num_wrong += answer.ids != self._script.answer(answer.request.sampling.seed)[: len(answer.ids)]
        self.client.ended(answer)

    def _ask_again(self) -> None:
        self._review.tick(self.cluster.events.now())
        self.cluster.events.background_after(INTERVAL_S, self._ask_again)

    def stop(self) -> None:
        """Make ``run`` return soon, with partial results."""
        self.is_stopped = True

    def run(self, on_look: Callable[["Simulation"], None] = lambda simulation: None) -> Figures:
        """Run to the end, or until ``stop``; return the results."""
        began_at = time.monotonic()
        events, client = self.cluster.events, self.client
        client.start()
        check = self.cluster.check if self._config.check else None
        while not client.is_done and not self.is_stopped:
            for _ in range(LOOK_EVERY):
                events.step()
                if check is not None:
                    check()
                if client.is_done:
                    break
            on_look(self)
        self.cluster.catch_up()
        last = client.outcomes[-1].due_at if client.outcomes else 0.0
        found = figures(
            self.cluster,
            client.outcomes,
            goals=self._goals,
            wall_s=time.monotonic() - began_at,
            measured=(self._config.warmup_s, last - self._config.cooldown_s),
            is_whole=not self.is_stopped,
        )
        if self._faults is not None:
            found["faults"] = {"injected": dict(self._faults.injected), "wrong_answers": self._num_wrong}
        return found


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely: modules and the plan live for a whole run, which makes few reference cycles.

    A process that has frozen objects itself, as one that runs tests does, keeps them frozen.
    """
    thresholds = gc.get_threshold()
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:
        gc.collect()
        gc.freeze()
    gc.set_threshold(100_000, 20, 1_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not is_frozen:
            gc.unfreeze()
