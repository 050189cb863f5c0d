"""``bench NAME``: run one benchmark, and check that it measured something.

A benchmark is a module ``NAME.py`` in a folder of ``scripts/benchmarks``. Its docstring says what it measures (the list
has its first line, and how long it takes), ``SHORTEST`` holds the options that ``--shortest`` stands for,
``add_options(parser)`` declares its own options, and ``run(options)`` prints its tables and returns the figures in them
by name.
"""

import argparse
import importlib
import json
import math
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.errors import BatonError, ConfigError
from scripts.load_tester.output_files import check_file

#: The folder of each benchmark, and how long it takes, whole and with --shortest, on two cores shared with other
#: programs.
BENCHMARKS = {
    "colocation": ("engines", "3 min", "15 s"),
    "control": ("services", "60 s", "5 s"),
    "disagg": ("services", "60 min", "10 s"),
    "engine": ("engines", "> 4 min", "15 s"),
    "foresight": ("virtual_time", "5 min", "20 s"),
    "gateway": ("services", "90 s", "10 s"),
    "gpu": ("engines", "7 min", "15 s"),
    "grammar": ("engines", "> 7 min", "10 s"),
    "handoff": ("services", "> 4 min", "20 s"),
    "launches": ("engines", "30 s", "10 s"),
    "loadtest": ("services", "65 s", "5 s"),
    "lora": ("engines", "60 s", "10 s"),
    "overload": ("services", "3 min", "20 s"),
    "planner": ("virtual_time", "> 8 min", "30 s"),
    "pictures": ("services", "4 min", "20 s"),
    "placement": ("virtual_time", "5 min", "15 s"),
    "quantization": ("engines", "4 min", "15 s"),
    "scale": ("services", "5 min", "15 s"),
    "scheduler": ("virtual_time", "60 s", "5 s"),
    "simulate": ("virtual_time", "5 min", "5 s"),
    "start": ("engines", "60 s", "15 s"),
    "tracing": ("services", "2 min", "10 s"),
    "transfer": ("services", "> 4 min", "40 s"),
}
NAMES = tuple(BENCHMARKS)
USAGE_STATUS, INTERRUPTED_STATUS = 2, 130


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0, 1 if the benchmark failed, 2 for wrong options, 130 after Ctrl-C or SIGTERM."""
    if not argv or argv[0] not in NAMES:
        is_question = bool(argv) and argv[0] in ("-h", "--help")
        if argv and not is_question:
            _say(f"bench: {argv[0]} is not a benchmark; choose from {', '.join(NAMES)}")
        else:
            print(_usage(), file=sys.stdout if is_question else sys.stderr)
        return 0 if is_question else USAGE_STATUS
    name, *words = argv
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # services and folders are given back, too
    try:
        return _run(name, words)
    except BatonError as error:
        _say(f"bench {name}: {error}")
        return USAGE_STATUS if isinstance(error, ConfigError) else 1
    except OSError as error:
        if not error.filename:
            raise
        _say(f"bench {name}: {error.filename}: {error.strerror}")
        return 1
    except KeyboardInterrupt:
        _say(f"bench {name}: stopped")
        return INTERRUPTED_STATUS
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(name: str, words: Sequence[str]) -> int:
    benchmark = importlib.import_module(f"scripts.benchmarks.{BENCHMARKS[name][0]}.{name}")
    parser = argparse.ArgumentParser(
        prog=f"bench {name}",
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    short = " ".join(benchmark.SHORTEST)
    parser.add_argument("--shortest", action="store_true", help=f"only check that it works; the same as {short}")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    benchmark.add_options(parser)
    options = parser.parse_args([*benchmark.SHORTEST, *words] if "--shortest" in words else words)
    check_file(options.json, "--json")
    check_numbers({name: value for name, value in vars(options).items() if value != parser.get_default(name)})
    figures = benchmark.run(options)
    if options.json:
        try:
            Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
        except OSError as error:  # the disk is full by now
            raise BatonError(f"--json {options.json} cannot be written: {error.strerror}") from None
    empty = [name for name in empty_figures(figures) if name not in getattr(benchmark, "MAY_BE_ZERO", ())]
    for figure in empty:
        _say(f"bench {name}: {figure} is {figures[figure]:g}, so nothing was measured")
    if not figures:
        _say(f"bench {name}: there are no figures")
    return 0 if figures and not empty else 1


def check_numbers(options: Mapping[str, object]) -> None:
    """Raise ConfigError, naming the flag, if a number, or one in a list, is not greater than zero."""
    for name, value in options.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, list | tuple):
                check_numbers({name: number})
            elif isinstance(number, int | float) and not 0 < number < math.inf and number is not False:
                raise ConfigError(f"--{name.replace('_', '-')} must be greater than 0, not {number}")


def empty_figures(figures: Mapping[str, float]) -> list[str]:
    """Names of the figures that are not finite numbers greater than zero."""
    return [name for name, value in figures.items() if not (math.isfinite(value) and value > 0)]


def _usage() -> str:
    """The benchmarks, how long each takes, and what it measures, in 80 columns."""
    lines = ["Usage: bench NAME [OPTIONS]", "", f"{'':15}whole   --shortest"]
    for name, (_, whole, shortest) in BENCHMARKS.items():
        lines.append(f"  {name:12} {whole:7} {shortest}")
        lines += textwrap.wrap(_summary(name), 76, initial_indent=" " * 6, subsequent_indent=" " * 6)
    lines += ["", "Measured on two busy cores; > means at least.", "bench NAME --help shows its options."]
    return "\n".join(lines)


def _summary(name: str) -> str:
    """The first line of a benchmark's docstring, read without importing the module and what it needs."""
    source = (Path(__file__).parent / BENCHMARKS[name][0] / f"{name}.py").read_text()
    return source.split("\n", 1)[0].strip('"').replace("``", "")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
