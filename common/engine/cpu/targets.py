"""The instruction sets that the kernels are compiled for, and the best of them that a processor has.

A checkout compiles the kernels for its own processor at the first start. A release wheel carries a library for each
target, since the machine that it is installed on may have no compiler.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

#: Names a target that the processor has, to use a lesser one than the best.
VARIABLE = "BATON_CPU_TARGET"


@dataclass(frozen=True)
class Target:
    """An instruction set.

    Attributes:
        features: what a processor needs, as Linux names it in /proc/cpuinfo.
        flags: of the compiler.
    """

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]


_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_VNNI = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni".split())
_BF16 = _VNNI | {"avx512_bf16"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")

#: The best first.
TARGETS = (
    Target(
        "amx", _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}, (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
    ),
    Target("avx512-bf16", _BF16, _BF16_FLAGS),
    Target("avx512-vnni", _VNNI, _VNNI_FLAGS),
    Target("x86-64-v3", _V3, ("-march=x86-64-v3",)),
)
#: For processors that have none of the others, with a compiler.
NATIVE = Target("native", frozenset(), ("-march=native",))


def choose_target(features: frozenset[str], environ: Mapping[str, str]) -> Target:
    """Return the best target for a processor with these features, or the one that ``BATON_CPU_TARGET`` names.

    Raises:
        ConfigError: the variable names no target, or one that this processor lacks.
    """
    usable = [target for target in TARGETS if target.features <= features] or [NATIVE]
    name = environ.get(VARIABLE)
    if not name:
        return usable[0]
    for target in usable:
        if target.name == name:
            return target
    names = ", ".join(target.name for target in usable)
    raise ConfigError(f"{VARIABLE}={name}: this processor runs {names}; give one of these, or unset the variable")


def own_target() -> Target:
    """Return the target for this process. Raises ConfigError as ``choose_target``."""
    return choose_target(processor_features(), os.environ)


def processor_features() -> frozenset[str]:
    """Return the features of the first processor; none if this is no x86-64 Linux."""
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())
