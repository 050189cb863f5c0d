"""A processor gets the best target whose features it has."""

from itertools import pairwise

import pytest

from common.engine.cpu.targets import TARGETS, choose_target, processor_features
from common.errors import ConfigError

HASWELL = frozenset("fpu sse2 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
SKYLAKE_SERVER = HASWELL | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
ICE_LAKE = SKYLAKE_SERVER | {"avx512_vnni"}
ZEN_4 = ICE_LAKE | {"avx512_bf16"}
SAPPHIRE_RAPIDS = ZEN_4 | {"amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (SAPPHIRE_RAPIDS, "amx"),
        (ZEN_4, "avx512-bf16"),
        (ICE_LAKE, "avx512-vnni"),
        (SKYLAKE_SERVER, "x86-64-v3"),
        (HASWELL, "x86-64-v3"),
        (HASWELL - {"avx2"}, "native"),
        (frozenset(), "native"),
    ],
)
def test_a_processor_gets_the_best_target_that_it_can_run(features: frozenset[str], name: str) -> None:
    assert choose_target(features, {}).name == name
    assert choose_target(features, {"BATON_CPU_TARGET": ""}).name == name


def test_a_variable_names_a_lesser_target() -> None:
    assert choose_target(SAPPHIRE_RAPIDS, {"BATON_CPU_TARGET": "x86-64-v3"}).name == "x86-64-v3"


@pytest.mark.parametrize("name", ["amx", "avx512", "native"])
def test_a_target_that_the_processor_lacks_is_refused_with_those_that_it_has(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^BATON_CPU_TARGET={name}: this processor runs avx512-bf16, avx512-vnni, x86-64-v3;"
    ):
        choose_target(ZEN_4, {"BATON_CPU_TARGET": name})


def test_every_target_has_the_features_of_those_after_it() -> None:
    for better, lesser in pairwise(TARGETS):
        assert better.features > lesser.features


def test_the_features_of_this_processor_are_words_of_proc_cpuinfo() -> None:
    found = processor_features()
    assert not found or "sse2" in found
