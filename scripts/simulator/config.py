"""Options of ``simulate``: limits and policies of the nodes, loads of the load tester, and the cost model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from common.cache.page_layout import PageLayout
from common.config.batching import BatchingOptions, check_batching, parse_window_ratio
from common.config.gateway import GatewayConfig, RoutingOptions, check_auto_roles
from common.config.node import NodeConfig
from common.config.options import check_unset, flag_of, option, options_of
from common.config.scheduling import SchedulingOptions, check_scheduling
from common.config.serve import check_local_prefill
from common.config.shared import Role
from common.errors import ConfigError
from common.node.loading.memory_plan import Capacity, plan_capacity
from gateway.workers.pool import WorkerPool, make_pool
from scripts.load_tester.config import SECONDS, LoadOptions, check_load, check_needs, check_url, parse_seconds
from scripts.simulator.costs import Costs
from scripts.simulator.faults import FAULT_NAMES, FaultOptions
from scripts.simulator.hardware.accelerators import ACCELERATORS
from scripts.simulator.hardware.model_shape import KNOWN_MODELS
from scripts.simulator.hardware.node_model import NodeModel, Profile, find_hardware
from scripts.simulator.service.engine import simulated_layout

POOL_TOKENS = 400_000
CONTEXT_LENGTH = 131_072
#: Options that ``--plan`` sets itself.
PLANNED = (
    "prefill", "decode", "num_requests", "duration", "concurrency", "warmup", "cooldown", "faults", "auto_roles",
)  # fmt: skip
#: Options that have an effect with ``--experiment``.
WITH_EXPERIMENT = {
    "experiment", "plan_windows", "plan_requests", "plan_processes", "slo_attainment", "seed", "json", "progress",
    "trace", "trace_unit", "trace_window", "trace_jitter", "length_scale", "max_input_len", "max_output_len",
}  # fmt: skip
FAULT_TIMES = ("kill_every", "fault_every", "node_timeout")
COST_OPTIONS = ("step_cost", "prompt_token_cost", "row_cost", "context_token_cost", "message_cost", "wire_latency")


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
    hardware: str | None = option(
        None,
        f"Take all costs from hardware and model: {', '.join(ACCELERATORS)}, or a JSON file that describes an "
        "accelerator or that --calibrate wrote.",
        metavar="NAME|FILE",
    )
    model: str | None = option(
        None,
        f"Model for --hardware: {', '.join(KNOWN_MODELS)}, or a folder with a config.json.",
        metavar="NAME|FOLDER",
    )
    prefill_tp: int = option(
        1, "Devices that share the model in a prefill node (tensor parallelism).", minimum=1, maximum=64
    )
    decode_tp: int = option(1, "The same for a decode node.", minimum=1, maximum=64)
    cores: int | None = option(
        None,
        "Processor cores that all nodes share, if they compute on the processor of one machine with a thread each: "
        "steps take longer while more nodes compute than there are cores, and, with a calibrated profile, while "
        "another node computes at all.",
        minimum=1,
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
class _Planning:
    """What ``--plan`` searches for, and how thoroughly."""

    plan: bool = option(
        False,
        "Search for the fewest nodes and their settings that hold the --slo options for --slo-attainment of requests. "
        "Settings that are given stay as they are, except for the chunks of colocated nodes.",
    )
    experiment: Literal["distserve", "mooncake"] | None = option(
        None,
        "Repeat what a paper claims: the highest rate at which separate and colocated nodes hold objectives. mooncake "
        "takes --trace; both take the options --plan-windows, --plan-requests and --plan-processes.",
    )
    plan_windows: int = option(
        6, "--plan: stretches of the trace, or seeds, that are simulated one by one.", minimum=3, maximum=1_000
    )
    plan_requests: int = option(
        900, "--plan: requests of all windows together; more take longer and say more.", minimum=3, maximum=1_000_000
    )
    plan_confidence: float = option(
        0.8, "--plan: least probability that the share is reached.", minimum=0.0, maximum=1.0
    )
    plan_processes: int | None = option(
        None, "--plan: processes that simulate. Without it: as many as there are cores.", minimum=1, maximum=256
    )
    price_per_hour: float | None = option(
        None, "--plan and --calibrate: US dollars per device and hour, instead of the table's.", minimum=0.0
    )


@dataclass(frozen=True, kw_only=True)
class _Calibration:
    """How ``--calibrate`` measures a live service."""

    calibrate: str | None = option(
        None,
        "Measure a live service with one prefill and one decode node, and write a profile to --json FILE, which "
        "--hardware takes. It must have no other load. With a profile in --hardware: measure a service with one "
        "prefill node and two decode nodes that share a processor, and add how much they slow each other.",
        metavar="URL",
    )
    calibrate_seconds: float = option(
        120.0, "--calibrate: seconds for which requests are sent.", minimum=1.0, maximum=86_400.0
    )
    api_key: str | None = option(
        None, "--calibrate: sent as a bearer token; better set in the environment.", is_secret=True
    )


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    json: str | None = option(None, "Write the report to FILE.", metavar="FILE")
    html: str | None = option(None, "--plan: write the report as one self-contained page.", metavar="FILE")
    progress: bool = option(True, "Show progress on standard error, if that is a terminal.")
    replay: str | None = option(
        None,
        "Replay a node's recording (--record) instead of simulating, and check that all plans are the same, byte for "
        "byte.",
        metavar="FILE",
    )
    check: bool = option(False, "Check the invariants of every node after every event; slow.")


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(
    _Outputs,
    _Calibration,
    _Planning,
    _Faults,
    LoadOptions,
    BatchingOptions,
    SchedulingOptions,
    RoutingOptions,
    _Service,
):
    ENV_PREFIX: ClassVar[str] = "BATON_SIMULATE_"

    max_total_tokens: int | None = option(
        None,
        f"Size of a node's KV pool in tokens. Without it: what --hardware has room for, or {POOL_TOKENS:,}.",
        minimum=1,
    )
    context_length: int | None = option(
        None,
        "Maximum number of tokens of prompt and output together. Without it: what the config.json of --model FOLDER "
        f"has, or {CONTEXT_LENGTH:,}.",
        minimum=2,
    )
    chunked_prefill_size: int | None = option(
        None,
        "Maximum number of prompt tokens computed in one step; -1: no limit. Without it: 8192, as on a GPU.",
        minimum=-1,
    )

    def __post_init__(self) -> None:
        if self.replay is not None:
            options = [
                found for found in options_of(SimulateConfig).values() if found.name not in ("replay", "progress")
            ]
            others = [found.flag for found in options if getattr(self, found.name) != found.default]
            if others:
                raise ConfigError(f"--replay takes everything from the recording: remove {', '.join(others)}")
        check_load(self)
        check_scheduling(self)
        check_batching(self)
        if parse_window_ratio(self.swa_full_tokens_ratio) != 1:
            raise ConfigError("--swa-full-tokens-ratio: the simulator knows one pool of pages only; leave it out")
        self._check_calibration()
        self._check_hardware()
        if not self.plan:  # which chooses nodes at which the model fits
            _ = self.costs
        if self.kv_bytes_per_token % 256:
            raise ConfigError(f"--kv-bytes-per-token must be a multiple of 256, not {self.kv_bytes_per_token}")
        check_local_prefill(self)
        for name in self.faults:
            if name not in FAULT_NAMES:
                raise ConfigError(f"--faults {name} is not a fault; choose from {', '.join(FAULT_NAMES)}")
        check_needs(self, [(name, "--faults", lambda config: config.faults) for name in FAULT_TIMES])
        check_auto_roles(self)
        self._check_plan()

    def _check_calibration(self) -> None:
        if self.calibrate is None:
            check_unset(self, ("calibrate_seconds", "api_key"), "needs --calibrate")
            return
        check_url(self.calibrate, "--calibrate")
        if self.json is None:
            raise ConfigError("--calibrate needs --json FILE, where it writes the profile")
        check_unset(self, ("plan", "trace", "faults", "cores"), "has no effect with --calibrate; leave one out")
        if self.hardware is not None and not isinstance(find_hardware(self.hardware, self.model).source, Profile):
            raise ConfigError(f"--calibrate adds to a profile, which --hardware {self.hardware} is not; leave it out")

    def _check_plan(self) -> None:
        if not self.plan:
            allowed: tuple[str, ...] = ("price_per_hour",) if self.calibrate is not None else ()
            if self.experiment is not None:
                allowed = tuple(WITH_EXPERIMENT)
                self._check_experiment()
            names = (*options_of(_Planning), "html")
            check_unset(self, [name for name in names if name not in allowed], "needs --plan")
            return
        if self.experiment is not None:
            raise ConfigError("--experiment has no effect with --plan; leave one out")
        if not self.slos:
            raise ConfigError("--plan needs objectives: give --slo-ttft, --slo-itl, --slo-tpot or --slo-e2e")
        check_unset(self, PLANNED, "has no effect with --plan; leave one out")
        if self.local_prefill == "always":
            raise ConfigError("--local-prefill always has no effect with --plan, which tries colocated nodes anyway")

    def _check_experiment(self) -> None:
        """An experiment brings its own nodes, objectives and, but for a trace, loads."""
        names = [name for name in options_of(SimulateConfig) if name not in WITH_EXPERIMENT]
        check_unset(self, names, "has no effect with --experiment; leave one out")

    def without_plan(self) -> "SimulateConfig":
        """The configuration of one simulation that the planner makes."""
        values = {name: getattr(SimulateConfig, name) for name in (*options_of(_Planning), "html", "json")}
        if self.hardware is not None:
            values |= {"prefill_tp": self.fitting_tp, "decode_tp": self.fitting_tp}
        return replace(self, **values)

    @property
    def fitting_tp(self) -> int:
        """The smallest tensor parallelism at which the model fits the hardware. Raises ConfigError: there is none."""
        assert self.hardware is not None
        sizes = find_hardware(self.hardware, self.model).tensor_parallel_sizes()
        if not sizes:
            raise ConfigError(
                f"--hardware {self.hardware}: {self.model} fits at no tensor parallelism up to 8; choose hardware with "
                "more memory, or a smaller model"
            )
        return sizes[0]

    def _check_hardware(self) -> None:
        if self.hardware is None:
            check_unset(self, (*(() if self.calibrate else ("model",)), "prefill_tp", "decode_tp"), "needs --hardware")
            return
        names = (*COST_OPTIONS, "wire_bandwidth", "kv_bytes_per_token")
        check_unset(self, names, "has no effect with --hardware; leave one out")
        if self.plan:
            _ = self.fitting_tp

    @cached_property
    def node_models(self) -> dict[Role, NodeModel]:
        """Costs and sizes of nodes by role, from ``--hardware``; empty without it."""
        if self.hardware is None:
            return {}
        hardware = find_hardware(self.hardware, self.model)
        decode = hardware.node(self.decode_tp, flag="--decode-tp")
        return {"prefill": hardware.node(self.prefill_tp) if self.prefill else decode, "decode": decode}

    @property
    def costs(self) -> Costs:
        """Costs of messages, transfers, and steps of all nodes that ``--hardware`` does not describe."""
        if self.node_models:  # the slower end of a connection decides
            return min((found.costs for found in self.node_models.values()), key=lambda one: one.wire_bytes_per_s)
        step, prompt_token, row, context_token, message, wire = (
            parse_seconds(getattr(self, name), flag_of(name)) or 0.0 for name in COST_OPTIONS
        )
        return Costs(step, prompt_token, row, context_token, message, wire, self.wire_bandwidth)

    @property
    def costs_beside(self) -> Costs | None:
        """Costs of steps on shared cores while another node computes; None if they are the same."""
        return self.node_models["decode"].costs_beside if self.node_models else None

    @property
    def costs_beside_decode(self) -> Costs | None:
        """Costs of steps of a decode node on shared cores while another decode node computes; None if unknown."""
        return self.node_models["decode"].costs_beside_decode if self.node_models else None

    @property
    def spread(self) -> Mapping[Role, Sequence[float]]:
        """By role, equally likely factors by which single steps differ from their costs on shared cores."""
        return self.node_models["decode"].spread if self.node_models else {}

    @property
    def fault_options(self) -> FaultOptions:
        return FaultOptions(self.faults, self.kill_every, self.fault_every, self.node_timeout, self.seed)

    @property
    def layout(self) -> PageLayout:
        kv_bytes = self.node_models["decode"].kv_bytes_per_token if self.node_models else self.kv_bytes_per_token
        return simulated_layout(kv_bytes, self.page_size)

    @property
    def node(self) -> NodeConfig:
        """Options of each node: those that both commands have."""
        ours = options_of(SimulateConfig)
        values = {name: getattr(self, name) for name in options_of(NodeConfig) if name in ours}
        values["kv_checksum"] = "off"  # pages have no contents
        values["max_total_tokens"] = self.max_total_tokens or POOL_TOKENS
        return NodeConfig(**values)

    @cached_property
    def max_context(self) -> int:
        """Tokens of prompt and output together."""
        shape = None if self.hardware is None else find_hardware(self.hardware, self.model).shape
        return self.context_length or (shape.context_length if shape else None) or CONTEXT_LENGTH

    @property
    def capacities(self) -> dict[Role, Capacity]:
        return {"prefill": self._capacity("prefill"), "decode": self._capacity("decode")}

    def _capacity(self, role: Role) -> Capacity:
        node = self.node
        if self.node_models and self.max_total_tokens is None:
            node = replace(node, max_total_tokens=self.node_models[role].pool_tokens)
        return plan_capacity(node, self.layout, device="cuda", context_length=self.max_context)

    def pool(self, model: str) -> WorkerPool:
        """Registry, router and admission of the gateway."""
        ours = options_of(SimulateConfig)
        values = {name: getattr(self, name) for name in options_of(GatewayConfig) if name in ours}
        del values["prefill"], values["decode"]  # numbers of nodes here, and addresses there
        values["tenant_header"] = True  # requests of the plan carry their tenant
        values |= {f"slo_{name}_ms": limit * 1_000 for name, limit in self.slos.items() if name in ("ttft", "itl")}
        return make_pool(GatewayConfig(**values), model, 1)
