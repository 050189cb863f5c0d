"""Simulates deployments under the windows of a load, in several processes, and remembers what it found."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from scripts.load_tester.analysis.metrics import slo_limits
from scripts.load_tester.workload.plan import make_plan
from scripts.load_tester.workload.request_classes import RequestClass
from scripts.serving.bound_process import bind_to
from scripts.simulator.client import Outcome
from scripts.simulator.config import SimulateConfig
from scripts.simulator.planning.deployment import Deployment
from scripts.simulator.planning.search import Goal
from scripts.simulator.planning.verdict import Verdict, WindowResult, is_hopeless, judge
from scripts.simulator.planning.windows import scaled, trace_of
from scripts.simulator.report import missed_limits
from scripts.simulator.simulation import Simulation, rare_collections

#: A window is stopped once this many times as many requests have missed as may. Further ones say little more.
STOP_AT = 2.0


def deployed(config: SimulateConfig, deployment: Deployment) -> SimulateConfig:
    """The configuration with the nodes and settings of a deployment."""
    own = deployment.settings
    return replace(
        config,
        prefill=deployment.num_prefill,
        decode=deployment.num_decode,
        prefill_tp=1 if own.is_colocated else own.prefill_tp,
        decode_tp=own.decode_tp,
        chunked_prefill_size=own.chunk_tokens,
        max_running_requests=own.batch_limit,
        local_prefill=own.local_prefill,
        enable_mixed_chunk=own.is_mixed or config.enable_mixed_chunk,
    )


def run_window(config: SimulateConfig, target: float) -> WindowResult:
    """Simulate one window, to its end or until it is hopeless."""
    plan = make_plan(config, trace_of(config))
    counted = {one.index for session in plan.sessions if session[0].at >= config.warmup_s for one in session}
    watch = _Watch(config.slos, plan.classes, counted, target)
    simulation = Simulation(config, plan)
    simulation.run(watch)
    watch(simulation)
    answered = [one for one in watch.judged if one.stamps_s and one.ended_at >= 0]
    gaps = [np.diff(one.stamps_s) for one in answered if len(one.stamps_s) > 1]
    return WindowResult(
        num_expected=watch.num_expected,
        num_judged=len(watch.judged),
        num_good=watch.num_good,
        num_late=watch.num_late,
        num_slow=watch.num_slow,
        ttft_p99_s=float(np.quantile([one.ttft_s for one in answered], 0.99)) if answered else 0.0,
        itl_p99_s=float(np.quantile(np.concatenate(gaps), 0.99)) if gaps else 0.0,
        is_whole=not simulation.is_stopped,
    )


class _Watch:
    """Judges requests while a simulation runs, and stops it when too many have missed their objectives.

    Args:
        counted: indices of the requests to judge: those of sessions that begin after the warm-up.
    """

    def __init__(
        self, limits: dict[str, float], classes: dict[str, RequestClass], counted: Collection[int], target: float
    ) -> None:
        self.num_expected = len(counted)
        self.judged: list[Outcome] = []
        self.num_good = self.num_late = self.num_slow = 0
        self._counted = counted
        self._limits = limits
        self._classes = classes
        self._most_missed = STOP_AT * (1 - target) * self.num_expected + 1
        self._num_seen = 0
        self._undecided: list[Outcome] = []

    def __call__(self, simulation: Simulation) -> None:
        outcomes = simulation.client.outcomes
        self._undecided += [one for one in outcomes[self._num_seen :] if one.planned.index in self._counted]
        self._num_seen = len(outcomes)
        self._undecided = [one for one in self._undecided if not self._is_decided(one, simulation)]
        if len(self.judged) - self.num_good > self._most_missed and not simulation.client.is_done:
            simulation.stop()

    def _is_decided(self, outcome: Outcome, simulation: Simulation) -> bool:
        """Judge a request that has ended, or whose first token is late."""
        limits = slo_limits(outcome.planned, self._limits, self._classes)
        if outcome.ended_at >= 0:
            missed = missed_limits(outcome, limits) if outcome.is_ok and outcome.stamps_s else ["ttft"]
        else:
            cluster = simulation.cluster
            answer = cluster.gateway.answers.get(f"r{outcome.planned.index}")
            waited_s = cluster.events.now() - outcome.due_at
            if answer is None or answer.stamps_s or waited_s <= limits.get("ttft", np.inf):
                return False
            missed = ["ttft"]
        self.judged.append(outcome)
        self.num_good += not missed
        is_late = "ttft" in missed or (missed == ["e2e"] and _waits_longer_than_it_decodes(outcome))
        self.num_late += is_late
        self.num_slow += bool(missed) and not is_late
        return True


def _waits_longer_than_it_decodes(outcome: Outcome) -> bool:
    return outcome.ttft_s > (outcome.ended_at - outcome.due_at) / 2


class Evaluator:
    """Evaluates deployments; the same one under the same load is simulated once.

    Args:
        windows: configurations of the windows.
        num_processes: of this machine's cores; 1 simulates in this process.
        on_result: called after each evaluation.
    """

    def __init__(
        self,
        windows: Sequence[SimulateConfig],
        goal: Goal,
        *,
        num_processes: int = 1,
        on_result: Callable[[Deployment, float, Verdict], None] = lambda deployment, factor, verdict: None,
    ) -> None:
        self._windows = windows
        self._goal = goal
        self._num_processes = min(num_processes, len(windows))
        self._on_result = on_result
        self._until_exit = ExitStack()
        self._pool: ProcessPoolExecutor | None = None
        self.known: dict[tuple[Deployment, float], Verdict] = {}

    def __enter__(self) -> "Evaluator":
        if self._num_processes > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = self._until_exit.enter_context(
                ProcessPoolExecutor(self._num_processes, context, initializer=_prepare_process, initargs=(os.getpid(),))
            )
        else:
            self._until_exit.enter_context(rare_collections())
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            if kind is not None:  # such as Ctrl-C; the windows that are under way may take minutes
                for process in multiprocessing.active_children():
                    process.terminate()
        self._until_exit.close()

    def __call__(self, deployment: Deployment, factor: float) -> Verdict:
        key = (deployment, round(factor, 6))
        if key not in self.known:
            verdict = self.known[key] = judge(self._results(deployment, factor), self._goal.share)
            self._on_result(deployment, factor, verdict)
        return self.known[key]

    def _results(self, deployment: Deployment, factor: float) -> list[WindowResult]:
        """The windows, as many as it takes to see that a deployment is hopeless, or all."""
        found: list[WindowResult] = []
        configs = [deployed(scaled(window, factor), deployment) for window in self._windows]
        for first in range(0, len(configs), self._num_processes):
            for result in self._run(configs[first : first + self._num_processes]):
                found.append(result)
                if is_hopeless(found, self._goal.share, len(configs)):
                    return found  # without later windows, so that the verdict does not depend on the processes
        return found

    def _run(self, configs: Sequence[SimulateConfig]) -> list[WindowResult]:
        if self._pool is None:
            return [run_window(config, self._goal.share) for config in configs]
        # The first call starts the processes, which inherit the mask. Ctrl-C reaches all of them, and this one ends the
        # others.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            futures: list[Future[WindowResult]] = [
                self._pool.submit(run_window, config, self._goal.share) for config in configs
            ]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return [future.result() for future in futures]


def _prepare_process(parent: int) -> None:
    """Leave Ctrl-C to the parent process, which ends the pool, and end with it; collect garbage rarely."""
    bind_to(parent, signal.SIGKILL)
    rare_collections().__enter__()
