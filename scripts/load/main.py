"""``loadtest``: the command.

Exit status: 0 fine, 1 the run could not be made or every request failed, 2 wrong options, 3 a run is invalid,
4 regressed (``--compare``), 5 outputs differ from the expected ones or none could be compared, 130 stopped.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.cli import resolve
from common.errors import BatonError, ConfigError
from scripts.load.config import NEEDS, LoadtestConfig, check_needs
from scripts.load.report import Report, write_json, write_jsonl

FINE, FAILED, WRONG, INVALID, REGRESSED, DIFFERENT = range(6)
STOPPED = 130
HELP = """Load an OpenAI-compatible server and say how it did: Baton, vLLM, SGLang, llama.cpp's server.

\b
Two more forms:
  loadtest --compare BEFORE.json AFTER.json    what changed, and whether it is significant; of runs or of sweeps
  loadtest --demo                              serve the small model, load it for a minute, write a report

\b
Examples:
  loadtest --rate 4 --duration 60s --html report.html            requests at Poisson instants, 4 a second
  loadtest --concurrency 8 --num-requests 200 --output-len 64    eight at a time
  loadtest --rate 1..10 --duration 2m --input-len lognormal:500:0.8:max=4000
  loadtest --find-goodput --slo-ttft 500ms --slo-itl 50ms        the highest rate that 90 % of requests find good
  loadtest --trace FILE --rate 2 --trace-window 0:600            a trace, at another pace
  loadtest --save-outputs A.jsonl, then --expect-file A.jsonl    the same outputs, token for token?

Latencies count from the instant at which a request should have gone out. Exit status: 0 fine, 1 failed, 2 wrong
options, 3 the run is invalid (the client could not keep up), 4 regressed, 5 outputs differ, 130 stopped."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if "--compare" in words:
            from scripts.load.compare import compare_command

            return compare_command(words)
        if "--demo" in words:
            from scripts.load.demo import demo_command

            return demo_command([word for word in words if word != "--demo"])
        config = resolve(LoadtestConfig, words, command="loadtest", help=HELP)
        return load_command(config)
    except ConfigError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return WRONG
    except BatonError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # whoever read the summary has seen enough
        sys.stdout = None
        return FINE


def load_command(config: LoadtestConfig, age_s: float | None = None) -> int:
    """Run what the configuration asks for and write what it wants written.

    Args:
        age_s: seconds that the start has taken so far; None for all since the process began.
    """
    check_outputs(config)
    from scripts.load.live import watched

    if config.find_goodput or config.sweep:
        from scripts.load.search import search_command

        return search_command(config)
    age_s = process_age_s() if age_s is None else age_s
    report = watched(config)
    report.start_up_s = (report.start_up_s or 0.0) + age_s
    return finish(config, report)


def process_age_s() -> float:
    """Seconds since this process began, the shell before it included (exec keeps the process); 0 if unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def finish(config: LoadtestConfig, report: Report) -> int:
    """Write the files, print the summary, give the exit status."""
    from scripts.load.table import summary_lines

    print("\n".join(summary_lines(report)))
    try:
        write_files(config, report)
    except OSError as error:
        print(f"loadtest: {error.filename or 'a file'} could not be written: {error.strerror}", file=sys.stderr)
        return FAILED
    if report.was_stopped:
        return STOPPED
    if report.outputs and (report.outputs["differ"] or not report.outputs["compared"]):
        return DIFFERENT
    if report.all_failed:
        print("loadtest: every request failed", file=sys.stderr)
        return FAILED
    return FINE if report.is_valid else INVALID


def write_files(config: LoadtestConfig, report: Report) -> None:
    """Those of --json, --jsonl, --parquet, --html and --save-outputs that are asked for."""
    began_at = time.monotonic()
    if config.json:
        write_json(report.to_dict(), config.json)
    if config.jsonl:
        write_jsonl(report.records, config.jsonl)
    if config.parquet:
        from scripts.load.parquet import write_parquet

        write_parquet(report.records, config.parquet)
    if config.save_outputs:
        from scripts.load.outputs import save_outputs

        save_outputs(report.records, config.save_outputs)
    if config.html:
        from scripts.load.html import write_html

        write_html([report], config.html)
    if config.svg:
        from scripts.load.pictures import of_run, write_svgs

        write_svgs([picture for *_, pictures in of_run(report) for picture in pictures], config.svg)
    names = [
        name
        for name in (config.svg, config.json, config.jsonl, config.parquet, config.html, config.save_outputs)
        if name
    ]
    if names:
        print(f"written in {time.monotonic() - began_at:.1f} s: {', '.join(names)}")


def check_outputs(config: LoadtestConfig) -> None:
    """Refuse now what would fail after the run, or do nothing in it.

    Raises:
        ConfigError: a file cannot be written, pyarrow is missing, or an option needs another one.
    """
    check_needs(config, NEEDS)
    for name in ("json", "jsonl", "parquet", "html", "save_outputs"):
        path = getattr(config, name)
        if not path:
            continue
        place, flag = Path(path).resolve(), "--" + name.replace("_", "-")
        if not place.parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no such folder")
        if place.is_dir():
            raise ConfigError(f"{flag} {path} is a folder: name a file in it")
        if not os.access(place if place.exists() else place.parent, os.W_OK):
            raise ConfigError(f"{flag} {path} cannot be written")
    if config.svg and Path(config.svg).exists() and not Path(config.svg).is_dir():
        raise ConfigError(f"--svg {config.svg} is a file: name a folder")
    if config.parquet:
        from scripts.load.parquet import require_pyarrow

        require_pyarrow()
    if config.expect_file and not Path(config.expect_file).is_file():
        raise ConfigError(f"--expect-file {config.expect_file}: there is no such file")


def at_rate(config: LoadtestConfig, rate: float) -> LoadtestConfig:
    """The same load at another rate."""
    return replace(config, rate=f"{rate:.6g}", sweep=None, find_goodput=False)


if __name__ == "__main__":
    sys.exit(main())
