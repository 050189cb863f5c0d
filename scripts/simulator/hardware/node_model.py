"""Costs and sizes of one node: from a roofline of its hardware and model, or from a calibrated profile.

The roofline: the matrix products of a step take as long as their multiplications or as reading the weights, whichever
is longer. Attention, all-reduce and a fixed overhead come on top of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from common.config.shared import Role
from common.errors import ConfigError
from scripts.simulator.costs import Costs
from scripts.simulator.hardware.accelerators import ACCELERATORS, Accelerator
from scripts.simulator.hardware.model_shape import ModelShape, find_shape

#: Share of the memory that weights and KV pages take together; the rest is for activations.
MEMORY_SHARE = 0.9
#: A pool of fewer tokens is refused.
MIN_POOL_TOKENS = 4_096
#: The simulator's page layouts come in multiples of this.
KV_UNIT = 256
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NodeModel:
    """Costs and sizes of one node.

    Attributes:
        num_devices: accelerators of the node.
        price_per_hour: of the whole node, in US dollars; 0 if unknown.
        costs_beside: costs while another node computes on the same processor (``--cores``); None if unknown.
        costs_beside_decode: costs of a decode node while another decode node computes there; None if unknown.
        spread: by role, equally likely factors between a step and its costs, where nodes share a processor.
    """

    costs: Costs
    kv_bytes_per_token: int
    pool_tokens: int
    num_devices: int
    price_per_hour: float
    costs_beside: Costs | None = None
    costs_beside_decode: Costs | None = None
    spread: Mapping[Role, Sequence[float]] = field(default_factory=dict)


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="profile", tag_field="kind"):
    """A calibrated node: what ``simulate --calibrate`` measured, of one model on one kind of node.

    Attributes:
        costs: parameters of ``Costs`` by name, in seconds and bytes per second.
        beside: costs that differ while another node computes on the same processor.
        beside_decode: costs of a decode step that differ while another decode node computes there.
        spread: factors of single steps, by role (``NodeModel``).
        num_devices: accelerators of the node.
        price_per_hour: of the whole node, in US dollars.
        errors: median relative error of the fit, by what was fitted.
        samples: number of measurements, by what was fitted.
    """

    model: str
    costs: dict[str, float]
    kv_bytes_per_token: int
    pool_tokens: int
    num_devices: int = 1
    price_per_hour: float = 0.0
    measured_at: str = ""
    errors: dict[str, float] = {}
    samples: dict[str, int] = {}
    beside: dict[str, float] = {}
    beside_decode: dict[str, float] = {}
    spread: dict[Role, tuple[float, ...]] = {}

    def __post_init__(self) -> None:
        names = set(Costs.__dataclass_fields__)
        for part in ("costs", "beside", "beside_decode"):
            for name, value in getattr(self, part).items():
                if name not in names:
                    raise ValueError(f"{part}.{name} is not a cost; known are {', '.join(sorted(names))}")
                if not 0 <= value < float("inf"):
                    raise ValueError(f"{part}.{name} must be at least 0")
        for role, factors in self.spread.items():
            if not factors or not all(0 <= factor < float("inf") for factor in factors):
                raise ValueError(f"spread.{role} must be factors of at least 0")
        if self.kv_bytes_per_token < 1 or self.pool_tokens < 1 or self.num_devices < 1:
            raise ValueError("kv_bytes_per_token, pool_tokens and num_devices must be more than 0")


@dataclass(frozen=True, slots=True)
class Hardware:
    """The value of ``--hardware`` and ``--model``."""

    source: Accelerator | Profile
    shape: ModelShape | None = None

    def tensor_parallel_sizes(self) -> list[int]:
        """Sizes of tensor parallelism, powers of two up to 8, at which the model fits."""
        if isinstance(self.source, Profile):
            return [1]
        found = []
        for tp in (1, 2, 4, 8):
            try:
                self.node(tp)
            except ConfigError:
                continue
            found.append(tp)
        return found

    def node(self, tp: int, *, flag: str = "--prefill-tp") -> NodeModel:
        """Costs and sizes of a node with ``tp`` devices. Raises ConfigError: they cannot serve the model."""
        if isinstance(self.source, Profile):
            if tp != 1:
                raise ConfigError(f"{flag} {tp} has no effect with a calibrated profile: its node is measured as it is")
            return _of_profile(self.source)
        assert self.shape is not None
        return _of_roofline(self.source, self.shape, tp, flag)


def _of_profile(profile: Profile) -> NodeModel:
    kv_bytes = _rounded(profile.kv_bytes_per_token)
    costs = Costs(**profile.costs)
    beside = replace(costs, **profile.beside) if profile.beside else None
    decode = replace(beside or costs, **profile.beside_decode) if profile.beside_decode else None
    sizes = (kv_bytes, profile.pool_tokens, profile.num_devices, profile.price_per_hour)
    return NodeModel(costs, *sizes, beside, decode, profile.spread)


def _of_roofline(device: Accelerator, shape: ModelShape, tp: int, flag: str) -> NodeModel:
    if tp > 1 and not device.link_bandwidth:
        raise ConfigError(f"{flag} {tp}: devices of the kind {device.name} cannot share a model; give 1")
    if shape.num_heads % tp:
        raise ConfigError(f"{flag} {tp}: the {shape.num_heads} heads of {shape.name} cannot be divided by it")
    kv_bytes = _rounded(shape.kv_bytes_per_token)
    # Fewer KV heads than devices: several devices hold the same head.
    kv_shards = min(tp, shape.num_kv_heads)
    room = device.memory_bytes * MEMORY_SHARE * tp - shape.weight_bytes
    tokens = int(room / tp * kv_shards / shape.kv_bytes_per_token)
    if tokens < MIN_POOL_TOKENS:
        raise ConfigError(
            f"{flag} {tp}: {shape.name} leaves no room for KV pages in the memory of {tp} x {device.name}; raise it"
        )
    costs = roofline(device, shape, tp)
    return NodeModel(costs, kv_bytes, tokens, tp, device.price_per_hour * tp)


def roofline(device: Accelerator, shape: ModelShape, tp: int = 1) -> Costs:
    """Costs of a model whose weights are divided among ``tp`` devices."""
    matrix = device.flops * device.matrix_efficiency * tp
    bandwidth = device.memory_bandwidth * device.bandwidth_efficiency
    heads = shape.num_heads * shape.head_dim
    all_reduces = 2 * shape.num_layers if tp > 1 else 0
    token_bytes = shape.hidden_size * shape.item_bytes
    return Costs(
        step_s=device.step_overhead_s + all_reduces * device.all_reduce_latency_s,
        weights_s=shape.step_bytes / (bandwidth * tp),
        prompt_token_s=2 * shape.layer_weights / matrix,
        row_s=2 * (shape.layer_weights + shape.output_weights) / matrix,
        # A ring sends 2 (tp - 1) / tp of the data over each link.
        token_s=all_reduces * token_bytes * 2 * (tp - 1) / tp / device.link_bandwidth if tp > 1 else 0.0,
        prompt_pair_s=4 * heads * shape.num_layers / (device.flops * device.attention_efficiency * tp),
        context_token_s=shape.kv_bytes_per_token / (bandwidth * min(tp, shape.num_kv_heads)),
        wire_bytes_per_s=device.network_bandwidth * tp,
    )


def _rounded(kv_bytes: int) -> int:
    return -(-kv_bytes // KV_UNIT) * KV_UNIT


def find_hardware(name_or_file: str, model: str | None) -> Hardware:
    """What ``--hardware`` and ``--model`` name together.

    Raises ConfigError: the hardware is unknown, its file is damaged, or the model is missing or superfluous.
    """
    source = _find_source(name_or_file)
    if isinstance(source, Profile):
        if model is not None:
            raise ConfigError(f"--model has no effect with the profile {name_or_file}, which is of {source.model}")
        return Hardware(source)
    if model is None:
        raise ConfigError(f"--hardware {name_or_file} needs --model: a name, or a folder with a config.json")
    return Hardware(source, find_shape(model))


def _find_source(name_or_file: str) -> Accelerator | Profile:
    known = ACCELERATORS.get(name_or_file.lower())
    if known is not None:
        return known
    path = Path(name_or_file).expanduser()
    if not path.is_file():
        raise ConfigError(f"--hardware {name_or_file} is neither {', '.join(ACCELERATORS)} nor a file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"--hardware {path}: more than {MAX_FILE_BYTES:,} bytes is not a description of hardware")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--hardware {path} cannot be read: {error.strerror}") from None
    try:
        found: Accelerator | Profile = msgspec.json.decode(text, type=Accelerator | Profile)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"--hardware {path}: {error}") from None
    return found
