"""Nodes and settings of a service that the planner weighs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.config.shared import LocalPrefillMode, Role


@dataclass(frozen=True, slots=True)
class Settings:
    """What all nodes of a deployment have in common.

    Attributes:
        prefill_tp, decode_tp: devices of a node; a colocated pool has ``decode_tp`` alone.
        chunk_tokens: ``--chunked-prefill-size``; -1 computes prompts whole, in a colocated pool in steps of their own.
        batch_limit: ``--max-running-requests``.
        local_prefill: ``--local-prefill``; ``always`` is a colocated pool, whose nodes compute prompts and outputs.
    """

    prefill_tp: int = 1
    decode_tp: int = 1
    chunk_tokens: int = 8_192
    batch_limit: int = 256
    local_prefill: LocalPrefillMode = "never"

    @property
    def is_colocated(self) -> bool:
        return self.local_prefill == "always"

    @property
    def is_mixed(self) -> bool:
        """Whether chunks of prompts are computed in the same steps as outputs."""
        return self.is_colocated and self.chunk_tokens > 0

    @property
    def roles(self) -> tuple[Role, ...]:
        return ("decode",) if self.is_colocated else ("prefill", "decode")

    def words(self) -> str:
        chunks = f"chunks of {self.chunk_tokens:,} tokens" if self.chunk_tokens > 0 else "whole prompts"
        parts = [chunks, f"at most {self.batch_limit:,} requests at once"]
        if self.is_mixed:
            parts.append("prompts and outputs in the same steps")
        elif self.local_prefill == "auto":
            parts.append("some prompts on the decode nodes")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Numbers of nodes with their settings; a colocated pool has no prefill nodes."""

    num_prefill: int
    num_decode: int
    settings: Settings = Settings()

    @property
    def num_nodes(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def num_devices(self) -> int:
        return self.num_prefill * self.settings.prefill_tp + self.num_decode * self.settings.decode_tp

    def count(self, role: Role) -> int:
        return self.num_prefill if role == "prefill" else self.num_decode

    def devices_of(self, role: Role) -> int:
        """Devices of one node of this role."""
        return self.settings.prefill_tp if role == "prefill" else self.settings.decode_tp

    def plus(self, role: Role, count: int = 1) -> "Deployment":
        if role == "prefill":
            return replace(self, num_prefill=self.num_prefill + count)
        return replace(self, num_decode=self.num_decode + count)

    def words(self) -> str:
        if self.settings.is_colocated:
            return f"{self.num_decode} colocated{_devices(self.settings.decode_tp)}"
        return (
            f"{self.num_prefill} prefill{_devices(self.settings.prefill_tp)} + "
            f"{self.num_decode} decode{_devices(self.settings.decode_tp)}"
        )

    def flags(self) -> Sequence[str]:
        """Options of ``simulate``, and of nodes, that give this deployment."""
        own = self.settings
        found = [f"--prefill {self.num_prefill}", f"--decode {self.num_decode}"]
        if own.prefill_tp > 1 and not own.is_colocated:
            found.append(f"--prefill-tp {own.prefill_tp}")
        if own.decode_tp > 1:
            found.append(f"--decode-tp {own.decode_tp}")
        found += [f"--chunked-prefill-size {own.chunk_tokens}", f"--max-running-requests {own.batch_limit}"]
        if own.local_prefill != "never":
            found.append(f"--local-prefill {own.local_prefill}")
        return [*found, "--enable-mixed-chunk"] if own.is_mixed else found


def _devices(tp: int) -> str:
    return f" (tp {tp})" if tp > 1 else ""
