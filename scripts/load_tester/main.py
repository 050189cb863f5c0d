"""``loadtest``: the command line.

Exit status: 0 fine, 1 the run failed or every request did, 2 wrong options, 3 a run is invalid, 4 regressed
(``--compare``), 5 outputs of ``--expect-file`` differ or are missing, 130 stopped.
"""

import sys
from collections.abc import Sequence

from common.config.cli import resolve
from common.errors import BatonError, ConfigError
from scripts.load_tester.command import load_command
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.output_files import FAILED, FINE, STOPPED, WRONG

HELP = """Load an OpenAI-compatible server (Baton, vLLM, SGLang, llama.cpp's) and report its latencies and goodput.

\b
Two more forms:
  loadtest --compare BEFORE.json AFTER.json   compare two runs or two sweeps;
                                              --compare --help has its options
  loadtest --demo                             serve and load the small model

\b
Examples:
  loadtest --rate 4 --duration 60s --html report.html  4 requests/s, Poisson
  loadtest --concurrency 8 --num-requests 200          8 at a time
  loadtest --rate 1..10 --duration 2m --input-len lognormal:500:0.8:max=4000
  loadtest --find-goodput --slo-ttft 500ms             most requests/s in time
  loadtest --trace FILE --rate 2 --trace-window 0:60   a trace at another rate
  loadtest --jsonl A.jsonl, then --expect-file A.jsonl   same tokens?

Latencies count from the instant at which a request should have gone out. Exit status: 0 fine, 1 failed, 2 wrong
options, 3 the run is invalid (the client fell behind), 4 regressed, 5 outputs of --expect-file differ or are
missing, 130 stopped."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if "--compare" in arguments:
            from scripts.load_tester.compare_command import compare_command

            return compare_command(arguments)
        if "--demo" in arguments:
            from scripts.load_tester.demo import demo_command

            return demo_command([one for one in arguments if one != "--demo"])
        config = resolve(LoadtestConfig, arguments, command="loadtest", help=HELP)
        return load_command(config)
    except ConfigError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return WRONG
    except BatonError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # the reader of standard output is gone
        sys.stdout = None
        return FINE
    except OSError as error:
        print(f"loadtest: {error.filename or 'a file'} could not be written: {error.strerror}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
