"""Options of ``chaos``."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from common.config.options import check_unset, option
from common.config.shared import SMALL_MODEL
from common.errors import ConfigError
from scripts.load_tester.config import MAX_SEED


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    ENV_PREFIX: ClassVar[str] = "BATON_CHAOS_"

    prefill: int = option(2, "Prefill nodes.", minimum=1, maximum=64)
    decode: int = option(2, "Decode nodes.", minimum=1, maximum=64)
    gateways: int = option(
        2,
        "Gateways. With two or more, each request has a key and is sent to another one when the connection is lost;"
        " with one, requests have no keys.",
        minimum=1,
        maximum=8,
    )
    model: str = option(SMALL_MODEL, "Model folder or Hugging Face hub id.")
    dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "Data type of the nodes. In bfloat16, tokens depend on the batch that they are computed in; the report then has"
        " the share of answers and of tokens that agree with the reference.",
    )
    transport: Literal["auto", "shm", "tcp", "nixl"] = option("auto", "Transport of KV pages.")
    max_total_tokens: int = option(4096, "KV tokens of each node; few make nodes retract requests.", minimum=1024)
    namespaces: bool = option(
        False, "Run each node in a network namespace of its own, so that the network can have faults. Needs root."
    )
    mtu: int = option(
        1500, "With --namespaces: bytes of the largest packet between two hosts.", minimum=576, maximum=65_520
    )
    packet_loss: float = option(
        0.0, "With --namespaces: percentage of the packets between two hosts that are lost.", minimum=0, maximum=50
    )
    packet_delay: float = option(
        0.0, "With --namespaces: milliseconds that a packet takes from host to host.", minimum=0, maximum=10_000
    )
    clock_step: int = option(
        0,
        "With --namespaces: seconds by which the clock of each host is ahead of the clock of the host before it.",
        minimum=0,
        maximum=1_000_000,
    )
    requests: int = option(1000, "Requests to send, not counting those of hostile clients.", minimum=1)
    duration: float | None = option(None, "Seconds after which no more requests are sent.", minimum=1)
    concurrency: int = option(16, "Requests in flight at any time.", minimum=1, maximum=10_000)
    distinct: int = option(64, "Distinct requests, of which each is sent many times.", minimum=1, maximum=10_000)
    request_timeout: float = option(180.0, "Seconds after which a request without an end counts as hanging.", minimum=1)
    seed: int = option(0, "Seed of the requests and of the schedule of faults.", minimum=0, maximum=MAX_SEED)
    faults: tuple[str, ...] = option(
        (),
        "Faults to inject, with commas between them. Without it: all that this machine can inject.",
        metavar="NAMES",
    )
    kill_every: float = option(
        15.0, "Seconds between two losses of a node or gateway: kills, hangs, cuts.", minimum=0.1
    )
    fault_every: float = option(2.0, "Seconds between two smaller faults.", minimum=0.1)
    node_timeout: float = option(5.0, "--node-timeout of the service: a silent node counts as lost.", minimum=0.5)
    drain_timeout: float = option(10.0, "--drain-timeout of the nodes.", minimum=0)
    max_kill_pause: float = option(3.0, "Longest pause of a stream, p99, after a loss that is seen at once.", minimum=0)
    check_pauses: bool = option(
        True, "Fail if pauses are longer than that, or for silent nodes than --node-timeout + 3 s."
    )
    json: str | None = option(None, "Write the report to FILE.", metavar="FILE")
    logs: str | None = option(
        None, "Keep the logs of all processes in this folder. Without it, they are kept only if the run fails.",
        metavar="FOLDER",
    )  # fmt: skip
    progress: bool = option(True, "Show progress on standard error, if that is a terminal.")

    def __post_init__(self) -> None:
        if self.namespaces and self.transport == "shm":
            raise ConfigError("--transport shm does not work between --namespaces; use auto, nixl or tcp")
        if not self.namespaces:
            check_unset(self, ("mtu", "packet_loss", "packet_delay", "clock_step"), "needs --namespaces")
