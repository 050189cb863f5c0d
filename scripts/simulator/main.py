"""``simulate``: the command.

Exit status: 0 for success, 1 if a replay differs or fails or the report cannot be written, 2 for wrong options, 130
after Ctrl-C.
"""

import gc
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.config.cli import resolve
from common.errors import ConfigError
from common.node.recording.format import RecordingError
from common.plugins import load_priority_function
from gateway.requests.admission.priority import PriorityResolver
from gateway.requests.admission.priority_review import INTERVAL_S, PriorityReview
from scripts.load_tester.workload.plan import Plan, make_plan
from scripts.simulator.client import Client, PlannedTokens
from scripts.simulator.cluster import Cluster
from scripts.simulator.config import CONTEXT_LENGTH, SimulateConfig
from scripts.simulator.engine import END_TOKEN, EmptyPageStore, ScriptedEngine
from scripts.simulator.faults import FaultInjector
from scripts.simulator.gateway import Answer
from scripts.simulator.node import MODEL, NodeSettings
from scripts.simulator.replay import replay
from scripts.simulator.report import Figures, Objectives, figures, table

HELP = """Run a service of many nodes in virtual time, with the schedulers, caches, admission, router and transfer
sessions of production. Only the clock, the engine and the network are replaced, by a cost model.

\b
Examples:
  simulate --prefill 2 --decode 6 --rate 8 --duration 10m --output-len 250
  simulate --prefill 8 --decode 8 --trace conversation_trace.jsonl
  simulate --trace TRACE.csv --time-scale 0.5 --schedule-policy lpm
  simulate --replay FILE   check a node's recording (--record)

Loads, traces and seeds are those of loadtest; limits and policies are those of the nodes. The same options give the
same result. An hour of a trace takes about a minute: find where a service saturates, and which limit, policy or ratio
of prefill to decode nodes helps."""

VOCAB_SIZE = 32_000
LOOK_EVERY = 2_000  # events
PROGRESS_EVERY_S = 2.0


class Simulation:
    """A service and its clients.

    Args:
        is_stepwise: every step is taken by itself, which is slower. The results are the same.
    """

    def __init__(self, config: SimulateConfig, plan: Plan, *, is_stepwise: bool = False) -> None:
        self._config = config
        self._script = script = PlannedTokens(config.seed, VOCAB_SIZE)
        layout, capacity = config.layout, config.capacity
        settings = NodeSettings(
            config.node,
            {"prefill": capacity, "decode": capacity},
            lambda given: ScriptedEngine(EmptyPageStore(layout, given.num_pages), script.answer, given.num_slots),
            config.costs,
            vocab_size=VOCAB_SIZE,
            context_length=config.context_length or CONTEXT_LENGTH,
            eos_token_ids=(END_TOKEN,),
            takes_steps_together=not (is_stepwise or config.check or config.faults or config.auto_roles),
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
            context_length=config.context_length or CONTEXT_LENGTH,
            max_new_tokens=config.max_new_tokens,
            timeout_s=config.request_timeout,
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

    def stop_faults(self) -> None:
        """Inject no more faults; those under way end as planned."""
        if self._faults is not None:
            self._faults.stop()

    def run(self, on_look: Callable[["Simulation"], None] = lambda simulation: None) -> Figures:
        """Run to the end, or until ``stop``; returns the results."""
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


class Progress:
    def __init__(self, num_sessions: int | None) -> None:
        self._num_sessions = num_sessions
        self._told_at = time.monotonic()
        self._told_rows = 0
        self._is_shown = False

    def __call__(self, simulation: Simulation) -> None:
        now = time.monotonic()
        if now - self._told_at < PROGRESS_EVERY_S:
            return
        rows = sum(node.work["rows"] for node in simulation.cluster.nodes.values())
        pace = (rows - self._told_rows) / (now - self._told_at) * 60e-6
        self._told_at, self._told_rows = now, rows
        client = simulation.client
        of = f" of {self._num_sessions:,} sessions begun" if self._num_sessions else ""
        line = (
            f"{simulation.cluster.events.now():,.1f} s simulated; {len(client.outcomes):,} requests sent{of}, "
            f"{client.num_ended:,} ended; {pace:.1f} million row-steps a minute"
        )
        self._is_shown = True
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def simulate(config: SimulateConfig) -> tuple[Figures, list[str]]:
    """Run a simulation; returns its results and notes about the load. Ctrl-C ends it early."""
    plan = make_plan(config)
    simulation = Simulation(config, plan)
    is_shown = config.progress and sys.stderr.isatty()
    progress = Progress(plan.num_sessions)

    def stop(*_: object) -> None:
        if simulation.is_stopped:
            raise KeyboardInterrupt
        simulation.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # modules and the plan live for the whole run, and the run makes few reference cycles
    gc.set_threshold(100_000, 20, 1_000)
    try:
        found = simulation.run(progress if is_shown else lambda simulation: None)
    finally:
        progress.clear()
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        for number, handler in before.items():
            signal.signal(number, handler)
    return found, plan.notes


def replay_command(path: str) -> int:
    """``--replay``: prints "identical" or the first difference; returns the exit status."""
    try:
        found = replay(path)
    except RecordingError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    what = f"{found.num_plans:,} plans of a {found.role} node in {found.num_frames:,} frames"
    print("\n".join(found.difference) if found.difference else f"identical: {what}")
    return 1 if found.difference else 0


def main(argv: Sequence[str] | None = None) -> int:
    config = resolve(SimulateConfig, argv, command="simulate", help=HELP)
    if config.replay is not None:
        return replay_command(config.replay)
    try:
        if config.json and not Path(config.json).resolve().parent.is_dir():
            raise ConfigError(f"--json {config.json}: the folder does not exist")
        found, notes = simulate(config)
    except ConfigError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    try:
        print("\n".join([*notes, "", *table(found)] if notes else table(found)), flush=True)
    except BrokenPipeError:
        sys.stdout = None
    if config.json:
        try:
            Path(config.json).write_text(json.dumps({"notes": notes, **found}, indent=2) + "\n")
        except OSError as error:
            print(f"simulate: cannot write --json {config.json}: {error.strerror}", file=sys.stderr)
            return 1
    return 0 if found["is_whole"] else 130


if __name__ == "__main__":
    sys.exit(main())
