"""Options of ``simulate``: limits and policies of the nodes, loads of the load tester, and the cost model."""

from dataclasses import dataclass
from typing import ClassVar

from common.cache.page_layout import PageLayout
from common.config.batching import Batching, check_batching
from common.config.gateway import GatewayConfig, Routing, check_auto_roles
from common.config.node import NodeConfig
from common.config.options import option, options_of
from common.config.scheduling import SchedulingOptions, check_scheduling
from common.config.serve import check_local_prefill
from common.errors import ConfigError
from common.node.loading.memory_plan import Capacity, plan_capacity
from gateway.workers.pool import WorkerPool, make_pool
from scripts.load_tester.config import SECONDS, LoadOptions, check_load, parse_seconds
from scripts.simulator.costs import Costs
from scripts.simulator.engine import simulated_layout
from scripts.simulator.faults import FAULT_NAMES, FaultOptions

POOL_TOKENS = 400_000
CONTEXT_LENGTH = 131_072


@dataclass(frozen=True, kw_only=True)
class _Service:
    """Number of nodes, and their speed."""

    prefill: int = option(1, "Prefill nodes; 0 with --local-prefill always.", minimum=0, maximum=100_000)
    decode: int = option(1, "Decode nodes.", minimum=1, maximum=100_000)
    step_cost: str = option(
        "5ms",
        "Fixed time of every engine step: launching it and reading the weights once. The defaults are roughly those "
        "of an 8-billion-parameter model in bfloat16 on one large GPU; measure your own with bench engine. "
        f"{SECONDS}",
    )
    prompt_token_cost: str = option("50us", f"Time added per prompt token in a step. {SECONDS}")
    row_cost: str = option("20us", f"Time added per decoding request in a step. {SECONDS}")
    context_token_cost: str = option(
        "0.04us", f"Time added per token of context that a decoding request attends to. {SECONDS}"
    )
    message_cost: str = option("100us", f"Time for a message between two processes. {SECONDS}")
    wire_latency: str = option("20us", f"Latency of a page transfer, beyond its transmission time. {SECONDS}")
    wire_bandwidth: float = option(
        25e9, "Bytes per second of a node's data connection, in each direction.", minimum=1.0
    )
    kv_bytes_per_token: int = option(
        131_072, "KV bytes of one token: 2 x layers x KV heads x head size x bytes per number.", minimum=256
    )
    max_new_tokens: int | None = option(
        None,
        "The max_tokens of every request; each ends at its planned length, which the nodes do not know. By default "
        "each request asks for exactly its planned length.",
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class _Faults:
    """Faults of nodes, of the connections between them, and of clients."""

    faults: tuple[str, ...] = option(
        (), f"Faults to inject, with commas between them: {', '.join(FAULT_NAMES)}.", metavar="NAMES"
    )
    kill_every: float = option(15.0, "Seconds between two losses of a node (kill, hang, cut).", minimum=0.001)
    fault_every: float = option(2.0, "Seconds between two other faults.", minimum=0.001)
    node_timeout: float = option(5.0, "Seconds of silence after which a node counts as lost.", minimum=0.1)


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    json: str | None = option(None, "Write the report to FILE.", metavar="FILE")
    progress: bool = option(True, "Show progress on standard error, if that is a terminal.")
    replay: str | None = option(
        None,
        "Replay a node's recording (--record) instead of simulating, and check that all plans are the same, byte for "
        "byte.",
        metavar="FILE",
    )
    check: bool = option(False, "Check the invariants of every node after every event; slow.")


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(_Outputs, _Faults, LoadOptions, Batching, SchedulingOptions, Routing, _Service):
    ENV_PREFIX: ClassVar[str] = "BATON_SIMULATE_"

    def __post_init__(self) -> None:
        if self.replay is not None:
            options = [found for found in options_of(SimulateConfig).values() if found.name != "replay"]
            others = [found.flag for found in options if getattr(self, found.name) != found.default]
            if others:
                raise ConfigError(f"--replay takes everything from the recording: remove {', '.join(others)}")
        check_load(self)
        check_scheduling(self)
        check_batching(self)
        _ = self.costs
        if self.kv_bytes_per_token % 256:
            raise ConfigError(f"--kv-bytes-per-token must be a multiple of 256, not {self.kv_bytes_per_token}")
        check_local_prefill(self)
        for name in self.faults:
            if name not in FAULT_NAMES:
                raise ConfigError(f"--faults {name} is not a fault; choose from {', '.join(FAULT_NAMES)}")
        check_auto_roles(self)

    @property
    def costs(self) -> Costs:
        names = ("step_cost", "prompt_token_cost", "row_cost", "context_token_cost", "message_cost", "wire_latency")
        step, prompt_token, row, context_token, message, wire = (
            parse_seconds(getattr(self, name), "--" + name.replace("_", "-")) or 0.0 for name in names
        )
        return Costs(step, prompt_token, row, context_token, message, wire, self.wire_bandwidth)

    @property
    def fault_options(self) -> FaultOptions:
        return FaultOptions(self.faults, self.kill_every, self.fault_every, self.node_timeout, self.seed)

    @property
    def layout(self) -> PageLayout:
        return simulated_layout(self.kv_bytes_per_token, self.page_size)

    @property
    def node(self) -> NodeConfig:
        """Options of each node: those that both commands have."""
        ours = options_of(SimulateConfig)
        values = {name: getattr(self, name) for name in options_of(NodeConfig) if name in ours}
        values["kv_checksum"] = "off"  # pages have no contents
        values["max_total_tokens"] = self.max_total_tokens or POOL_TOKENS
        return NodeConfig(**values)

    @property
    def capacity(self) -> Capacity:
        return plan_capacity(
            self.node, self.layout, device="cuda", context_length=self.context_length or CONTEXT_LENGTH
        )

    def pool(self, model: str) -> WorkerPool:
        """Registry, router and admission of the gateway."""
        ours = options_of(SimulateConfig)
        values = {name: getattr(self, name) for name in options_of(GatewayConfig) if name in ours}
        values["tenant_header"] = True  # requests of the plan carry their tenant
        return make_pool(GatewayConfig(**values), model, 1)
