"""Nodes that compute in different formats have different weight versions, unless their page layouts differ."""

import pytest

from common.config.node import NodeConfig
from common.engine.models.config import ModelConfig
from common.node.loading.model_loading import formats
from tests.support.service.service import SMALL_MODEL


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"dtype": "bfloat16"}, []),  # the format of its pages says so
        ({"weight_dtype": "int8"}, ["int8"]),
        ({"kv_cache_dtype": "int8", "dtype": "bfloat16"}, ["bfloat16"]),
        ({"kv_cache_dtype": "int8", "dtype": "float32", "weight_dtype": "int4"}, ["int4", "float32"]),
    ],
)
def test_a_weight_version_names_the_formats_that_pages_do_not_show(
    options: dict[str, str], expected: list[str]
) -> None:
    config = NodeConfig(model=str(SMALL_MODEL), **options)  # type: ignore[arg-type]
    assert formats(config, ModelConfig.load(SMALL_MODEL)) == expected
