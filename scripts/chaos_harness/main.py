"""``chaos``: the command.

Exit status: 0 every invariant holds, 1 one does not or the service failed, 2 wrong options, 130 stopped.
"""

import asyncio
import contextlib
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from common.config.cli import resolve
from common.config.options import to_flags
from common.errors import BatonError, ConfigError
from common.model_folder import find_checkpoint
from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.faults.table import FAULTS
from scripts.chaos_harness.report import Figures, figures, table
from scripts.chaos_harness.run import Run
from scripts.chaos_harness.verdicts import broken_invariants, long_pauses
from scripts.load_tester.output_files import check_file, check_folder
from scripts.temporary_folder import TemporaryFolder

HELP = f"""Load a real service while faults happen to it, and prove that no request is lost, wrong or hanging and that
nothing leaks.

\b
Examples:
  chaos --requests 10000
  chaos --faults kill,hang --kill-every 5 --seed 3
  chaos --namespaces --prefill 3 --decode 3   with faults of the network; needs root

Faults: {", ".join(FAULTS)}.

Every distinct request is asked once without faults; every later answer must equal that one. Prints each fault as it is
injected, and at the end a table. Exit status: 0 if every invariant holds, 1 if not, with the command that repeats the
run; 2 wrong options, 130 stopped."""

FINE, FAILED, WRONG, STOPPED = 0, 1, 2, 130


async def chaos(config: ChaosConfig, folder: Path) -> Figures:
    """Run once; return the report. Raises asyncio.CancelledError after Ctrl-C, when everything has been stopped."""
    run = Run(config, folder, lambda line: print(line, flush=True))
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(run.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    began_at = loop.time()
    found = await task
    broken = broken_invariants(run.tally, found)
    if config.check_pauses:
        broken += long_pauses(found)
    took_s = loop.time() - began_at
    return figures(run.tally, found, broken=broken, injected=run.injected, took_s=took_s)


def main(argv: Sequence[str] | None = None) -> int:
    config = resolve(ChaosConfig, argv, command="chaos", help=HELP)
    try:
        _check(config)
    except ConfigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return WRONG
    folder = TemporaryFolder("baton-chaos-")
    status = STOPPED
    try:
        status = _run_and_report(config, folder.path)
    except ConfigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        status = WRONG
    except (BatonError, BaseExceptionGroup) as error:
        first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        print(f"chaos: {first}", file=sys.stderr)
        status = FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    finally:
        _keep_logs(config, folder, is_kept=status == FAILED)
    return status


def _run_and_report(config: ChaosConfig, folder: Path) -> int:
    """Run, and print the report; return the exit status. Raises ConfigError, BatonError."""
    shown = asyncio.run(chaos(config, folder))
    print("\n".join(table(shown, _repeat(config))), flush=True)
    if config.json:
        try:
            Path(config.json).write_text(json.dumps(shown, indent=2) + "\n")
        except OSError as error:
            print(f"chaos: cannot write --json {config.json}: {error.strerror}", file=sys.stderr)
            return FAILED
    return FAILED if shown["broken"] else FINE


def _check(config: ChaosConfig) -> None:
    """Raises ConfigError: a fault is unknown, there is no such model, or a file or folder cannot be written."""
    find_checkpoint(config.model)
    check_file(config.json, "--json")
    check_folder(config.logs, "--logs")
    for name in config.faults:
        if name not in FAULTS:
            raise ConfigError(f"--faults {name} is not a fault; choose from {', '.join(FAULTS)}")


def _repeat(config: ChaosConfig) -> str:
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    words = [word for word in to_flags(ChaosConfig, values) if not word.startswith(("--json", "--logs", "--seed"))]
    return " ".join(["./scripts/chaos", f"--seed={config.seed}", *words])


def _keep_logs(config: ChaosConfig, folder: TemporaryFolder, *, is_kept: bool) -> None:
    if config.logs is not None:
        target = Path(config.logs)
        target.mkdir(parents=True, exist_ok=True)
        for log in folder.path.rglob("*.log"):
            with contextlib.suppress(OSError):
                shutil.copy(log, target)
    elif is_kept:
        folder.keep()
        print(f"logs: {folder.path}", file=sys.stderr)
        return
    folder.close()


if __name__ == "__main__":
    sys.exit(main())
