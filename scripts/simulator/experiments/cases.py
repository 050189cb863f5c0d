"""The experiments: what papers claim, under which loads and objectives it is looked at, and what is compared.

The papers ran other models, engines and data. Here the same schedulers, costs and loads are on both sides of each
comparison, so that only what the claim is about differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from scripts.simulator.planning.deployment import Deployment, Settings

Name = Literal["distserve", "mooncake"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A deployment under comparison.

    Attributes:
        options: fields of ``SimulateConfig`` that differ from those of the case.
        is_baseline: whether the paper compared with a service like this.
    """

    name: str
    deployment: Deployment
    options: Mapping[str, Any] = field(default_factory=dict)
    is_baseline: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A load with its objectives.

    Attributes:
        options: fields of ``SimulateConfig``.
        rate: requests per second for each device, where the search begins.
    """

    name: str
    options: Mapping[str, Any]
    rate: float
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One or several cases for one claim.

    Attributes:
        takes_trace: whether ``--trace`` replaces the drawn load.
    """

    name: Name
    claim: str
    cases: tuple[Case, ...]
    takes_trace: bool = False


def colocated(num_nodes: int, chunk: int, tp: int = 1) -> Deployment:
    return Deployment(0, num_nodes, Settings(1, tp, chunk, 256, "always"))


def separate(num_prefill: int, num_decode: int, tp: int = 1) -> Deployment:
    return Deployment(num_prefill, num_decode, Settings(tp, tp, 8_192, 256, "never"))


_DISTSERVE = (
    Variant("colocated, whole prompts", colocated(4, -1), is_baseline=True),
    Variant("colocated, chunks of 512", colocated(4, 512)),
    Variant("colocated, chunks of 128", colocated(4, 128)),
    Variant("3 prefill + 1 decode", separate(3, 1)),
    Variant("2 prefill + 2 decode", separate(2, 2)),
    Variant("1 prefill + 3 decode", separate(1, 3)),
)
_OPT = {"hardware": "a100", "model": "opt-13b", "context_length": 8_192}
_CHAT = {
    **_OPT,
    "input_len": "lognormal:300:0.9:max=1024",
    "output_len": "lognormal:150:0.8:max=512",
    "slo_ttft": "250ms",
}

DISTSERVE = Experiment(
    "distserve",
    "DistServe (OSDI 2024): separate prefill and decode nodes serve up to 7.4 times the requests of colocated ones "
    "within their objectives.",
    (
        Case(
            "chat",
            {**_CHAT, "slo_tpot": "100ms"},
            2.0,
            _DISTSERVE,
        ),
        Case(
            "chat, strict gaps",
            {**_CHAT, "slo_itl": "40ms"},
            2.0,
            _DISTSERVE,
        ),
        Case(
            "code",
            {**_OPT, "input_len": "lognormal:150:0.5:max=512", "output_len": "lognormal:80:0.6:max=300",
             "slo_ttft": "125ms", "slo_tpot": "200ms"},
            4.0,
            _DISTSERVE,
        ),
        Case(
            "summaries",
            {**_OPT, "input_len": "lognormal:1500:0.6:max=4000", "output_len": "lognormal:70:0.7:max=300",
             "slo_ttft": "2s", "slo_tpot": "150ms"},
            1.0,
            _DISTSERVE,
        ),
    ),
)  # fmt: skip

_NO_CACHE = {"disable_radix_cache": True}
MOONCAKE = Experiment(
    "mooncake",
    "Mooncake (FAST 2025): separate nodes and prefix caches handle 75 % more real requests within their objectives "
    "than colocated nodes, and up to 525 % more in simulated loads.",
    (
        Case(
            "conversations",
            {
                "hardware": "a100", "model": "llama-3.1-70b", "slo_ttft": "30s", "slo_itl": "100ms",
                # Without --trace: long prompts, a third of which are shared with others of 40 groups.
                "input_len": "lognormal:6000:0.9:max=60000", "output_len": "lognormal:300:0.7:max=2000",
                "prefix_len": 4_000, "prefix_groups": 40,
            },
            0.02,
            (
                Variant("4 colocated, whole prompts, no cache", colocated(4, -1, 8), _NO_CACHE, is_baseline=True),
                Variant("4 colocated, whole prompts", colocated(4, -1, 8)),
                Variant("4 colocated, chunks of 512", colocated(4, 512, 8)),
                Variant("4 colocated, chunks of 128", colocated(4, 128, 8)),
                Variant("3 prefill + 1 decode, no cache", separate(3, 1, 8), _NO_CACHE),
                Variant("3 prefill + 1 decode", separate(3, 1, 8)),
                Variant("2 prefill + 2 decode", separate(2, 2, 8)),
            ),
        ),
    ),
    takes_trace=True,
)  # fmt: skip

EXPERIMENTS: Mapping[str, Experiment] = {one.name: one for one in (DISTSERVE, MOONCAKE)}
