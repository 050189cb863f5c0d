"""``loadtest``: the command.

Exit status: 0 fine, 1 the run could not be made or every request failed, 2 wrong options, 3 a run is invalid,
4 regressed (``--compare``), 5 not all expected outputs came, 130 stopped.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from common.config.cli import resolve
from common.errors import BatonError, ConfigError
from scripts.load_tester.config import NEEDS, LoadtestConfig, check_needs
from scripts.load_tester.reporting.files import TO_STDOUT, Report, write_json, write_jsonl

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
options, 3 the run is invalid (the client could not keep up), 4 regressed, 5 outputs of --expect-file differ or did not
come, 130 stopped."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if "--compare" in words:
            from scripts.load_tester.analysis.compare import compare_command

            return compare_command(words)
        if "--demo" in words:
            from scripts.load_tester.demo import demo_command

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
    except BrokenPipeError:  # whoever read has seen enough
        sys.stdout = None
        return FINE
    except OSError as error:  # of a sweep's or a comparison's files
        print(f"loadtest: {error.filename or 'a file'} could not be written: {error.strerror}", file=sys.stderr)
        return FAILED


def load_command(config: LoadtestConfig, age_s: float | None = None) -> int:
    """Run what the configuration asks for and write what it wants written.

    Args:
        age_s: seconds that the start has taken so far; None for all since the process began.
    """
    check_outputs(config)
    if config.json == TO_STDOUT and sys.stdout is not sys.stderr:
        with redirect_stdout(sys.stderr):
            return load_command(config, age_s)
    from scripts.load_tester.reporting.progress import watched

    if config.find_goodput or config.sweep:
        from scripts.load_tester.analysis.goodput_search import search_command

        return search_command(config)
    age_s = process_age_s() if age_s is None else age_s
    report = watched(config)
    if report.start_up_s is not None:
        report.start_up_s += age_s
    return finish(config, report)


def process_age_s() -> float:
    """Seconds since this process began, the shell before it included (exec keeps the process); 0 if unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def finish(config: LoadtestConfig, report: Report) -> int:
    """Print the summary, write the files, give the exit status."""
    from scripts.load_tester.reporting.text_report import outputs_words, summary_lines

    say(*summary_lines(report))
    is_written = write_files(_writers(config, report))
    if report.was_stopped:
        return STOPPED
    if not is_written:
        return FAILED
    if report.outputs and not report.outputs["is_passed"]:
        print(f"loadtest: --expect-file {config.expect_file}: {outputs_words(report.outputs)}", file=sys.stderr)
        return DIFFERENT
    if report.all_failed:
        print("loadtest: every request failed", file=sys.stderr)
        return FAILED
    return FINE if report.is_valid else INVALID


def say(*lines: str) -> None:
    """Print; a reader that has gone away (``| head``) does not keep the files from being written."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_files(writers: Sequence[tuple[str, Callable[[str], object]]]) -> bool:
    """Whether all files, by path and writer, were written; one that cannot be does not keep the others from it."""
    began_at = time.monotonic()
    written, is_whole = [], True
    for name, write in writers:
        try:
            write(name)
            written.append(name)
        except (OSError, ValueError, OverflowError) as error:  # a full disk; what a server said that no format holds
            is_whole = False
            print(f"loadtest: {name} could not be written: {error}", file=sys.stderr)
    if written:
        say(f"written in {time.monotonic() - began_at:.1f} s: {', '.join(written)}")
    return is_whole


def _writers(config: LoadtestConfig, report: Report) -> list[tuple[str, Callable[[str], object]]]:
    """Path and writer of each file that is asked for."""
    from scripts.load_tester.analysis.output_check import save_outputs
    from scripts.load_tester.reporting.charts import of_run, write_svgs
    from scripts.load_tester.reporting.html_report import write_html
    from scripts.load_tester.workload.parquet import write_parquet

    writers: tuple[tuple[str | None, Callable[[str], object]], ...] = (
        (config.json, lambda path: write_json(report.to_dict(), path)),
        (config.jsonl, lambda path: write_jsonl(report.records, path)),
        (config.parquet, lambda path: write_parquet(report.records, path)),
        (config.save_outputs, lambda path: save_outputs(report.records, path)),
        (config.html, lambda path: write_html([report], path)),
        (config.svg, lambda path: write_svgs([one for *_, pictures in of_run(report) for one in pictures], path)),
    )
    return [(path, write) for path, write in writers if path]


def check_outputs(config: LoadtestConfig) -> None:
    """Refuse now what would fail after the run, or do nothing in it.

    Raises:
        ConfigError: a file cannot be written, pyarrow is missing, or an option needs another one.
    """
    check_needs(config, NEEDS)
    used = {Path(path).resolve(): flag for flag, path in _inputs(config)}  # nothing is written over what is read
    for name in ("json", "jsonl", "parquet", "html", "save_outputs"):
        path, flag = getattr(config, name), "--" + name.replace("_", "-")
        if not path or (name == "json" and path == TO_STDOUT):
            continue
        if path == TO_STDOUT:
            raise ConfigError(f"{flag} -: only --json can go to standard output; for a file of that name, ./-")
        check_file(path, flag)
        other = used.setdefault(Path(path).resolve(), flag)
        if other != flag:
            raise ConfigError(f"{other} and {flag} name the same file, {path}")
    check_folder(config.svg, "--svg")
    if config.parquet:
        from scripts.load_tester.workload.parquet import require_pyarrow

        require_pyarrow()
    if config.expect_file and not Path(config.expect_file).is_file():
        raise ConfigError(f"--expect-file {config.expect_file}: there is no such file")


def _inputs(config: LoadtestConfig) -> list[tuple[str, str]]:
    """Flags and paths of the files that are read."""
    named = [("--" + name.replace("_", "-"), getattr(config, name)) for name in ("trace", "expect_file", "tenant_keys")]
    lengths = (("--input-len", config.input_len), ("--output-len", config.output_len), ("--turns", config.turns))
    named += [(flag, text[5:].partition(":max=")[0]) for flag, text in lengths if text.startswith("file:")]
    return [(flag, path) for flag, path in named if path]


def check_file(path: str | None, flag: str) -> None:
    """Raises ConfigError, naming the flag, for a file that could not be written."""
    if path is None:
        return
    place = Path(path).resolve()
    if not place.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no such folder")
    if place.is_dir():
        raise ConfigError(f"{flag} {path} is a folder: name a file in it")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written")


def check_folder(path: str | None, flag: str) -> None:
    """Raises ConfigError, naming the flag, for a folder that is none or could not be made."""
    if path is None:
        return
    place = Path(path).resolve()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not there.is_dir():
        raise ConfigError(f"{flag} {path}: {there} is a file: name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path} cannot be written")


def at_rate(config: LoadtestConfig, rate: float) -> LoadtestConfig:
    """The same load at another rate."""
    return replace(config, rate=f"{rate:.6g}", sweep=None, find_goodput=False)


if __name__ == "__main__":
    sys.exit(main())
