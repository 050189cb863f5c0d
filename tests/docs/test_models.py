"""The table of architectures in docs/models.md says what the tests find in small models of them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine.library_models import LIBRARY_MODELS, WITHOUT_PLAN, make_library_model

from common.engine.models.config import ARCHITECTURES
from common.engine.models.implementation import check_divided_model
from common.engine.models.transformers_impl.config import TransformersConfig
from common.errors import ConfigError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+(?:ForCausalLM|LMHeadModel))` \| (.* \| .*) \|$", PAGE, flags=re.M))


def test_the_table_has_every_tested_architecture_in_order() -> None:
    assert list(ROWS) == sorted(LIBRARY_MODELS, key=str.lower)
    assert set(ARCHITECTURES) <= set(ROWS), "a native family without a row"


@pytest.mark.slow(sample=0.3)
@pytest.mark.parametrize("architecture", LIBRARY_MODELS)
def test_a_row_names_what_the_layers_have(tmp_path: Path, architecture: str) -> None:
    _, _, has = ROWS[architecture].partition(" | ")
    assert has == ", ".join(features(tmp_path, architecture))


def features(folder: Path, architecture: str) -> Iterator[str]:
    config = TransformersConfig.load(str(make_library_model(folder, architecture)))
    layers = config.layers
    windows = [layer.window is not None for layer in layers]
    if architecture in ARCHITECTURES:
        yield "native without windows" if any(windows) else "native"
    if any(windows):
        yield "windows" if all(windows) else "windows in some layers"
    if any(layer.soft_cap for layer in layers):
        yield "soft cap"
    if any(layer.sinks for layer in layers):
        yield "sinks"
    if config.value_dim != config.head_dim:
        yield "values of another size than keys"
    if any("expert" in key or key.startswith("moe") for key in LIBRARY_MODELS[architecture][1]):
        yield "experts"
    if architecture in WITHOUT_PLAN:
        with pytest.raises(ConfigError, match="has no plan"):
            check_divided_model(config, 2)
        yield "no `--tp`"
    else:
        check_divided_model(config, 2)
