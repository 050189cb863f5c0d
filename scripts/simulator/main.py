"""``simulate``: the command.

Exit status: 0 for success, 1 if a replay differs, a plan finds nothing or the report cannot be written, 2 for wrong
options and files that cannot be read, 130 after Ctrl-C.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence

from common.config.cli import resolve
from common.errors import ConfigError
from common.node.recording.format import RecordingError
from scripts.load_tester.output_files import check_distinct, check_file, say
from scripts.load_tester.workload.plan import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.replay import replay
from scripts.simulator.report import Figures, table, write_report
from scripts.simulator.simulation import Simulation, rare_collections

HELP = """Run a service of many nodes in virtual time, with the schedulers, caches, admission, router and transfer
sessions of production. Only the clock, the engine and the network are replaced, by a cost model.

\b
Examples:
  simulate --prefill 2 --decode 6 --rate 8 --duration 10m --output-len 250
  simulate --prefill 8 --decode 8 --trace conversation_trace.jsonl
  simulate --trace TRACE.csv --time-scale 0.5 --schedule-policy lpm
  simulate --hardware h200 --model llama-3.1-8b --prefill 2 --decode 2 --rate 40
  simulate --plan --trace TRACE.csv --slo-ttft 500ms --slo-itl 50ms
      --hardware h200 --model llama-3.1-8b --html plan.html
  simulate --calibrate http://127.0.0.1:8000 --json profile.json
  simulate --plan --hardware profile.json --rate 5 --slo-ttft 1s --slo-itl 80ms
  simulate --experiment distserve
  simulate --replay FILE   check a node's recording (--record)

Loads, traces and seeds are those of loadtest; limits and policies are those of the nodes. The same options give the
same result. An hour of a trace takes about a minute: find where a service saturates, and which limit, policy or ratio
of prefill to decode nodes helps."""

PROGRESS_EVERY_S = 2.0


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
    """Run a simulation; return its results and notes about the load. Ctrl-C ends it early."""
    plan = make_plan(config)
    simulation = Simulation(config, plan)
    is_shown = config.progress and sys.stderr.isatty()
    progress = Progress(plan.num_sessions)

    def stop(*_: object) -> None:
        if simulation.is_stopped:
            raise KeyboardInterrupt
        simulation.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with rare_collections():
            found = simulation.run(progress if is_shown else lambda simulation: None)
    finally:
        progress.clear()
        for number, handler in before.items():
            signal.signal(number, handler)
    return found, plan.notes


def replay_command(path: str) -> int:
    """``--replay``: prints "identical" or the first difference; returns the exit status."""
    try:
        found = replay(path)
    except RecordingError as error:
        print(f"simulate: --replay: {error}", file=sys.stderr)
        return 2
    what = f"{found.num_plans:,} plans of a {found.role} node in {found.num_frames:,} frames"
    print("\n".join(found.difference) if found.difference else f"identical: {what}")
    return 1 if found.difference else 0


def _other_command(config: SimulateConfig) -> Callable[[SimulateConfig], int] | None:
    """The command behind --plan, --calibrate or --experiment, whose modules need those here; None for a simulation."""
    if config.plan:
        from scripts.simulator.planning.command import plan_command

        return plan_command
    if config.calibrate is not None:
        from scripts.simulator.calibration.command import calibrate_command

        return calibrate_command
    if config.experiment is not None:
        from scripts.simulator.experiments.command import experiment_command

        return experiment_command
    return None


def main(argv: Sequence[str] | None = None) -> int:
    config = resolve(SimulateConfig, argv, command="simulate", help=HELP)
    try:
        if config.replay is not None:
            return replay_command(config.replay)
        check_file(config.json, "--json")
        check_file(config.html, "--html")
        check_distinct([("--trace", config.trace)], [("--json", config.json), ("--html", config.html)])
        if (other := _other_command(config)) is not None:
            return other(config)
        found, notes = simulate(config)
    except ConfigError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    is_written = write_report(config.json, "--json", lambda: json.dumps({"notes": notes, **found}, indent=2) + "\n")
    say(*([*notes, ""] if notes else []), *table(found))
    if not is_written:
        return 1
    return 0 if found["is_whole"] else 130


if __name__ == "__main__":
    sys.exit(main())
