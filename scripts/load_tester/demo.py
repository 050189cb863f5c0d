"""``--demo``: serves the small model, loads it for a minute and writes a report."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from common.config.cli import resolve
from common.errors import ConfigError
from scripts.load_tester.command import check_outputs, load_command
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.output_files import FAILED, TO_STDOUT
from scripts.serving.bound_process import bound_command

REPORT = "loadtest-demo.html"
DEFAULTS = (
    "--endpoint=generate", "--duration=60s", "--rate=4", "--warmup=5s", "--prefix-len=64", "--prefix-groups=4",
    "--slo-ttft=500ms", "--slo-itl=100ms", "--input-len=lognormal:150:0.6:max=1000",
    "--output-len=lognormal:60:0.5:max=300",
)  # fmt: skip


def demo_command(arguments: Sequence[str]) -> int:
    """Run the demo; other options override its defaults. Return the exit status."""
    given = {one.split("=")[0] for one in arguments}
    if "--url" in given:
        raise ConfigError("--demo serves its own model: leave --url or --demo out")
    defaults = [one for one in DEFAULTS if one.split("=")[0] not in given]
    if given & {"--concurrency", "--sweep", "--trace"}:
        defaults = [one for one in defaults if not one.startswith("--rate")]
    if "--trace" in given:  # a trace has its own lengths and prefixes
        own_names = ("--input-len", "--output-len", "--prefix")
        defaults = [one for one in defaults if not one.startswith(own_names)]
    if "--no-stream" in given:  # all tokens come at the end
        defaults = [one for one in defaults if not one.startswith("--slo-")]
    if "--html" not in given:
        defaults.append(f"--html={Path.cwd() / REPORT}")
    words = [*defaults, *arguments]
    config = resolve(LoadtestConfig, words, command="loadtest")
    check_outputs(config)  # before the service starts
    with redirect_stdout(sys.stderr) if config.json == TO_STDOUT else nullcontext():
        return _serve_and_load(words)


def _serve_and_load(words: Sequence[str]) -> int:
    print("serving the small model ...", flush=True)
    command = [sys.executable, "-m", "scripts.cli", "serve", "--port=0", "--log-level=warning"]
    with subprocess.Popen(bound_command(command, signal.SIGTERM), stdout=subprocess.PIPE, text=True) as service:
        try:
            url = _ready(service)
            if not url:
                print("loadtest: the service did not start", file=sys.stderr)
                return FAILED
            config = resolve(LoadtestConfig, [*words, f"--url={url}"], command="loadtest")
            is_single = not (config.sweep or config.find_goodput)
            print(f"loading {url}; this takes {config.duration}{'' if is_single else ' a rate'}", flush=True)
            status = load_command(config, age_s=0.0)  # the start of the service does not count
            if config.html and Path(config.html).exists():
                print(f"open {Path(config.html).resolve().as_uri()} in a browser", flush=True)
        finally:
            service.terminate()
            service.wait()
    return status


def _ready(service: "subprocess.Popen[str]") -> str:
    """URL of the service once it is ready; empty if it ended instead."""
    assert service.stdout
    for line in service.stdout:
        if line.startswith("ready "):
            return line.split()[1]
    return ""
