"""What every engine that is measured beside ours can do, and which of them ``--peer`` names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.errors import ConfigError

#: What PATH is in ``--peer NAME=PATH``.
PEERS = {"vllm": "a python with vLLM", "llama.cpp": "llama.cpp's folder with build/bin and gguf-py"}


@dataclass(frozen=True)
class Workload:
    """What all engines compute with in one run.

    Attributes:
        num_layers: of the shape.
        context: cached tokens of a row before its first decode step.
        max_prompt: tokens of the longest prompt.
        shape: one of ``bench engine --shape``.
    """

    num_layers: int
    num_threads: int
    context: int
    num_steps: int
    max_prompt: int
    max_batch: int
    shape: str = "qwen3-0.6b"


class Peer(Protocol):
    """Another engine. Every call is one round."""

    @property
    def name(self) -> str: ...

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds from a cold prompt to its first token."""
        ...

    def decode_s(self, batch: int) -> float:
        """Return the seconds of ``num_steps`` steps of ``batch`` rows."""
        ...

    def close(self) -> None: ...


def parse_peers(words: Sequence[str], *, among: Sequence[str] = tuple(PEERS)) -> dict[str, Path]:
    """Return the paths of ``NAME=PATH``, by name. Raises ConfigError: a name or a path is unknown."""
    found = {}
    for word in words:
        name, equals, path = word.partition("=")
        if name not in among or not equals:
            known = ", ".join(f"{known}=PATH ({PEERS[known]})" for known in among)
            raise ConfigError(f"--peer {word}: give {known}")
        if not Path(path).exists():
            raise ConfigError(f"--peer {word}: {path} does not exist; give {PEERS[name]}")
        found[name] = Path(path).absolute()  # not resolved: the python of an environment is a link
    return found
