"""llama.cpp, with its own ``llama-batched-bench`` on a GGUF file of the same shape with random weights in bfloat16."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common.errors import ConfigError
from scripts.benchmarks.peers.peer import Workload

WRITER = Path(__file__).with_name("write_gguf.py")
#: The longest time for one round, or for writing the weights.
MAX_ROUND_S = 900.0


class LlamaCppPeer:
    """Raises ConfigError: the folder lacks the program or the package that writes GGUF files, or one of them fails."""

    name = "llama.cpp"

    def __init__(self, folder: Path, workload: Workload) -> None:
        self._program = folder / "build/bin/llama-batched-bench"
        package = folder / "gguf-py"
        for needed in (self._program, package):
            if not needed.exists():
                raise ConfigError(f"--peer llama.cpp={folder}: there is no {needed}; build llama-batched-bench there")
        self._workload = workload
        self._place = tempfile.TemporaryDirectory(prefix="bench-llama-cpp-")
        self._model = Path(self._place.name) / "model.gguf"
        try:
            _run(
                [sys.executable, str(WRITER), str(self._model), str(workload.num_layers), workload.shape],
                {**os.environ, "PYTHONPATH": str(package)},
            )
        except ConfigError:
            self.close()
            raise

    def prefill_s(self, num_tokens: int) -> float:
        return self._measure(num_prompt=num_tokens, num_steps=1, batch=1, prompts=f"{num_tokens},1")["t_pp"]

    def decode_s(self, batch: int) -> float:
        """The rows share a prompt, whose KV is copied: that of every row is read all the same."""
        num_prompt, steps = self._workload.context, self._workload.num_steps
        return self._measure(num_prompt=num_prompt, num_steps=steps, batch=batch, steps=f"{steps},1")["t_tg"]

    def close(self) -> None:
        self._place.cleanup()

    def _measure(
        self, *, num_prompt: int, num_steps: int, batch: int, prompts: str = "", steps: str = ""
    ) -> dict[str, float]:
        """Return the figures of one measurement.

        The program may end before its last line is written. So it measures something short afterwards, which is in
        ``prompts`` or ``steps``: the lengths in their order, separated by commas.
        """
        threads = str(self._workload.num_threads)
        context = batch * (num_prompt + num_steps + 1)
        output = _run(
            [
                str(self._program), "-m", str(self._model), "-t", threads, "-tb", threads, "-c", str(context), "-pps",
                "-b", "2048", "-ub", "512", "-npp", prompts or str(num_prompt), "-ntg", steps or str(num_steps),
                "-npl", str(batch),
                "--output-format", "jsonl",
            ],
            dict(os.environ),
        )  # fmt: skip
        return parse_output(output)


def parse_output(output: str) -> dict[str, float]:
    """Return the first line of figures. Raises ConfigError: there is none."""
    for line in output.splitlines():
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    raise ConfigError(f"--peer llama.cpp: llama-batched-bench printed no figures: {output[-500:].strip()}")


def _run(command: list[str], environ: dict[str, str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=MAX_ROUND_S, env=environ)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--peer llama.cpp: {Path(command[0]).name} took more than {MAX_ROUND_S:g} s") from None
    if ended.returncode != 0:
        raise ConfigError(f"--peer llama.cpp: {Path(command[0]).name} failed: {ended.stderr[-1000:].strip()}")
    return ended.stdout
