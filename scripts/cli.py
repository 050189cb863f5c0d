"""``baton COMMAND``: the same commands as ``./scripts/COMMAND``, for an installation with pip.

A gateway or node replaces this process image, so that its command line shows what it is.
"""

import os
import sys
from importlib import import_module

from common.standard_output import OUTPUT_ERRORS, output_failed
from common.version import VERSION

INTERRUPTED = 130

WORKER = "scripts.serving.worker"
PROCESSES = {"gateway": ("gateway",), "prefill": (WORKER, "prefill"), "decode": (WORKER, "decode")}
#: Modules with a ``main`` that takes the words behind the command; only the one in question is imported.
MAINS = {
    "serve": "scripts.serving.serve",
    "cluster": "scripts.cluster_manager.main",
    "apikey": "scripts.apikey",
    "keygen": "scripts.keygen",
    "loadtest": "scripts.load_tester.main",
    "simulate": "scripts.simulator.main",
    "chaos": "scripts.chaos_harness.main",
    "bench": "scripts.benchmarks.main",
}
USAGE = """\
Usage: baton COMMAND [OPTIONS]

  serve     gateway, prefill nodes and decode nodes on this machine
  gateway   the gateway; nodes on any machine connect to it
  prefill   one prefill node
  decode    one decode node
  cluster   gateways and nodes on the hosts of a Ray cluster
  apikey    an API key for clients, and its entry in the gateway's file of keys
  keygen    keys for a gateway and nodes on several machines
  loadtest  load test of an OpenAI-compatible server
  simulate  a service of many nodes in virtual time, with the production schedulers
  chaos     a service under load and faults, with proof that nothing is lost
  bench     one benchmark by name

baton COMMAND --help shows a command's options, baton --version the version."""


def main() -> int:
    try:
        try:
            return _run(sys.argv[1:])
        finally:
            if sys.stdout is not None:  # it is closed
                sys.stdout.flush()
    except KeyboardInterrupt:  # while a command is loading; each command handles it itself once it runs
        return INTERRUPTED
    except OSError as error:
        if error.filename or error.errno not in OUTPUT_ERRORS:
            raise
        command = sys.argv[1] if len(sys.argv) > 1 else ""
        return output_failed(command if command in MAINS else "baton", error)


def _run(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("", [])
    if command in PROCESSES:
        os.environ["PYTHONSAFEPATH"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", *PROCESSES[command], *rest])
    if command in MAINS:
        status: int = import_module(MAINS[command]).main(rest)
        return status
    if command == "--version":
        print(f"baton {VERSION}")
        return 0
    is_question = command in ("-h", "--help", "help")
    print(
        USAGE if is_question or not command else f"baton: {command} is not a command\n\n{USAGE}",
        file=sys.stdout if is_question else sys.stderr,
    )
    return 0 if is_question else 2


if __name__ == "__main__":
    sys.exit(main())
