"""What a simulation can be told: the same limits and policies as nodes, the same loads as the load test, and costs."""

from dataclasses import dataclass
from typing import ClassVar

from common.cache.page_layout import PageLayout
from common.config.batching import Batching, check_batching
from common.config.gateway import GatewayConfig, Routing
from common.config.node import NodeConfig
from common.config.options import option, options_of
from common.config.scheduling import SchedulingOptions, check_scheduling
from common.config.serve import check_local_prefill
from common.errors import ConfigError
from common.node.memory_plan import Capacity, plan_capacity
from gateway.workers.pool import WorkerPool, make_fleet
from scripts.load_tester.config import SECONDS, LoadOptions, check_load, seconds
from scripts.simulator.costs import Costs
from scripts.simulator.engine import blank_geometry

POOL_TOKENS = 400_000
CONTEXT_LENGTH = 131_072


@dataclass(frozen=True, kw_only=True)
class _Service:
    """How many nodes, and how fast they are."""

    prefill: int = option(1, "Prefill nodes; 0 with --local-prefill always.", minimum=0, maximum=100_000)
    decode: int = option(1, "Decode nodes.", minimum=1, maximum=100_000)
    step_cost: str = option(
        "5ms",
        "Time of any step of the engine, whatever is in it: launching it and reading the weights once. The defaults "
        "are roughly those of an 8-billion-parameter model in bfloat16 on one large GPU; take your own from "
        f"bench engine. {SECONDS}",
    )
    prompt_token_cost: str = option("50us", f"Time on top, of each prompt token that a step computes. {SECONDS}")
    row_cost: str = option("20us", f"Time on top, of each request that decodes a token in a step. {SECONDS}")
    context_token_cost: str = option(
        "0.04us", f"Time on top, of each token of context that a decoding request looks back at. {SECONDS}"
    )
    message_cost: str = option("100us", f"Time that a message takes from process to process. {SECONDS}")
    wire_latency: str = option("20us", f"Time that pages take on their way, beyond that of their bytes. {SECONDS}")
    wire_bandwidth: float = option(25e9, "Bytes per second of a node's data connection, each way.", minimum=1.0)
    kv_bytes_per_token: int = option(
        131_072, "Bytes of KV of one token: 2 x layers x KV heads x head size x bytes of a number.", minimum=256
    )
    max_new_tokens: int | None = option(
        None,
        "Output tokens that every request allows itself, as users do who do not know; it ends by itself at its planned "
        "length. Otherwise each asks for exactly what it is going to need, and nodes know it.",
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    json: str | None = option(None, "Write the report.", metavar="FILE")
    progress: bool = option(True, "Say on standard error how far it has come, where that is a terminal.")
    replay: str | None = option(
        None,
        "Instead of simulating: replay what a node recorded (--record), and say whether its plans come out the same, "
        "byte for byte.",
        metavar="FILE",
    )
    check: bool = option(False, "Prove the books of every node after every event; slow.")


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(_Outputs, LoadOptions, Batching, SchedulingOptions, Routing, _Service):
    """What ``simulate`` runs with."""

    ENV_PREFIX: ClassVar[str] = "BATON_SIMULATE_"

    def __post_init__(self) -> None:
        if self.replay is not None:
            options = [found for found in options_of(SimulateConfig).values() if found.name != "replay"]
            others = [found.flag for found in options if getattr(self, found.name) != found.default]
            if others:
                raise ConfigError(f"--replay goes alone, the recording says all else: leave out {', '.join(others)}")
        check_load(self)
        check_scheduling(self)
        check_batching(self)
        _ = self.costs
        if self.kv_bytes_per_token % 256:
            raise ConfigError(f"--kv-bytes-per-token must be a multiple of 256, not {self.kv_bytes_per_token}")
        check_local_prefill(self)

    @property
    def costs(self) -> Costs:
        names = ("step_cost", "prompt_token_cost", "row_cost", "context_token_cost", "message_cost", "wire_latency")
        step, prompt_token, row, context_token, message, wire = (
            seconds(getattr(self, name), "--" + name.replace("_", "-")) or 0.0 for name in names
        )
        return Costs(step, prompt_token, row, context_token, message, wire, self.wire_bandwidth)

    @property
    def geometry(self) -> PageLayout:
        return blank_geometry(self.kv_bytes_per_token, self.page_size)

    @property
    def node(self) -> NodeConfig:
        """What a node is told: every option that both know."""
        ours = options_of(SimulateConfig)
        values = {name: getattr(self, name) for name in options_of(NodeConfig) if name in ours}
        values["max_total_tokens"] = self.max_total_tokens or POOL_TOKENS
        return NodeConfig(**values)

    @property
    def capacity(self) -> Capacity:
        return plan_capacity(self.node, self.geometry, device="cuda", context_length=CONTEXT_LENGTH)

    def fleet(self, model: str) -> WorkerPool:
        """The gateway's pure parts."""
        ours = options_of(SimulateConfig)
        values = {name: getattr(self, name) for name in options_of(GatewayConfig) if name in ours}
        values["tenant_header"] = True  # the plan says whose a request is
        return make_fleet(GatewayConfig(**values), model, 1)
