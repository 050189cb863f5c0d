"""``loadtest`` with a resolved configuration: checks its files, runs the load, writes the results."""

import os
import re
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

from common.config.options import flag_of
from common.errors import ConfigError
from scripts.load_tester.config import NEEDS, LoadtestConfig, check_needs
from scripts.load_tester.output_files import (
    DIFFERENT,
    FAILED,
    FINE,
    INVALID,
    STOPPED,
    TO_STDOUT,
    check_distinct,
    check_file,
    check_folder,
    say,
    write_files,
)
from scripts.load_tester.reporting.report import Report, write_json, write_jsonl


def load_command(config: LoadtestConfig, age_s: float | None = None) -> int:
    """Run the load and write the results; return the exit status.

    Args:
        age_s: seconds since the command was started; None for the age of this process.
    """
    check_outputs(config)
    if config.json == TO_STDOUT and sys.stdout is not sys.stderr:
        with redirect_stdout(sys.stderr):
            return load_command(config, age_s)
    if config.find_goodput or config.sweep:
        from scripts.load_tester.search_command import search_command

        return search_command(config)
    from scripts.load_tester.reporting.progress import run_with_progress

    age_s = _process_age_s() if age_s is None else age_s
    report = run_with_progress(config)
    if report.start_up_s is not None:
        report.start_up_s += age_s
    return _finish(config, report)


def _process_age_s() -> float:
    """Seconds since this process began, including the shell that started it with exec; 0 if unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def _finish(config: LoadtestConfig, report: Report) -> int:
    from scripts.load_tester.reporting.headline import describe_outputs
    from scripts.load_tester.reporting.text_report import summary_lines

    try:
        say(*summary_lines(report))
    finally:  # also where standard output cannot be written
        has_all = _write_results(config, report)
    if report.was_stopped:
        return STOPPED
    if not has_all:
        return FAILED
    if report.outputs and not report.outputs["is_passed"]:
        print(f"loadtest: --expect-file {config.expect_file}: {describe_outputs(report.outputs)}", file=sys.stderr)
        return DIFFERENT
    if report.all_failed:
        print("loadtest: every request failed", file=sys.stderr)
        return FAILED
    return FINE if report.is_valid else INVALID


def _write_results(config: LoadtestConfig, report: Report) -> bool:
    from scripts.load_tester.reporting.charts import run_charts, write_svgs
    from scripts.load_tester.reporting.html_report import write_html

    return write_files([
        ("--json", config.json, lambda path: write_json(report.to_dict(), path)),
        ("--jsonl", config.jsonl, lambda path: write_jsonl(report.records, path)),
        ("--html", config.html, lambda path: write_html([report], path)),
        ("--svg", config.svg, lambda path: write_svgs(run_charts(report), path)),
    ])  # fmt: skip


def check_outputs(config: LoadtestConfig) -> None:
    """Refuse before the run what would fail after it or have no effect.

    Raises ConfigError: a file cannot be written, or an option needs another one.
    """
    check_needs(config, NEEDS)
    written: list[tuple[str, str | None]] = []
    for name in ("json", "jsonl", "html"):
        path, flag = getattr(config, name), flag_of(name)
        if not path or (name == "json" and path == TO_STDOUT):
            continue
        check_file(path, flag)
        written.append((flag, path))
    check_distinct(_inputs(config), written)
    check_folder(config.svg, "--svg")
    if config.expect_file and not Path(config.expect_file).is_file():
        raise ConfigError(f"--expect-file {config.expect_file}: there is no such file")


def _inputs(config: LoadtestConfig) -> list[tuple[str, str | None]]:
    lengths = [("--input-len", config.input_len), ("--output-len", config.output_len), ("--turns", config.turns)]
    lengths += [("--mix", text) for text in re.split("[=,;]", config.mix or "")]
    return [
        ("--trace", config.trace),
        ("--expect-file", config.expect_file),
        ("--tenant-keys", config.tenant_keys),
        *((flag, text[5:].partition(":max=")[0]) for flag, text in lengths if text.startswith("file:")),
    ]
