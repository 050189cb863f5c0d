"""``simulate --experiment NAME``."""

import json
import os
import sys

from common.errors import ConfigError
from scripts.load_tester.output_files import say
from scripts.simulator.config import SimulateConfig
from scripts.simulator.experiments.cases import EXPERIMENTS
from scripts.simulator.experiments.run import Measured, lines_of, run_experiment
from scripts.simulator.report import write_report


def experiment_command(config: SimulateConfig) -> int:
    """Run, print, and write ``--json``; return the exit status."""
    assert config.experiment is not None
    experiment = EXPERIMENTS[config.experiment]
    if config.trace is not None and not experiment.takes_trace:
        raise ConfigError(f"--trace has no effect with --experiment {experiment.name}, whose loads are drawn")

    def tell(one: Measured) -> None:
        if config.progress:
            over = "over " if one.is_open else ""
            words = f"{one.case.name}, {one.variant.name}: {over}{one.rate:.3g} requests/s per device"
            print(words, file=sys.stderr, flush=True)

    processes = config.plan_processes or os.cpu_count() or 1
    measured = run_experiment(experiment, config, num_processes=processes, on_measured=tell)
    rows = [
        {
            "case": one.case.name,
            "variant": one.variant.name,
            "requests_per_s_per_device": one.rate,
            "holds_at_all_rates_tried": one.is_open,
        }
        for one in measured
    ]
    content = {"claim": experiment.claim, "measured": rows}
    is_written = write_report(config.json, "--json", lambda: json.dumps(content, indent=2) + "\n")
    say(*lines_of(experiment, measured))
    return 0 if is_written else 1
