"""Families beyond the tested ones: the comparison at start lets them pass, or they are refused with the reason.

``docs/models.md``, "Other models", says the same.
"""

from pathlib import Path

import pytest
from support.engine.engine_driver import check_tokens
from support.engine.library_models import LIBRARY_MODELS, OTHER_MODELS, make_library_model
from support.engine.reference_models import draw_prompts

from common.engine.factory import load_executor
from common.engine.models.implementation import ModelSource, load_config
from common.errors import UnsupportedModelError

MAX_NEW = 5


@pytest.mark.slow(sample=0.1)
@pytest.mark.parametrize("architecture", [name for name, (*_, reason) in OTHER_MODELS.items() if not reason])
def test_a_family_that_passes_the_comparison_gives_the_tokens_of_the_library(tmp_path: Path, architecture: str) -> None:
    folder = make_library_model(tmp_path, architecture, seed=7)
    config = load_config(ModelSource(str(folder)))
    assert config.implementation == "transformers"
    executor = load_executor(config, dtype="float32", num_slots=8, num_pages=60, page_size=16)
    check_tokens(executor, draw_prompts(folder, [1, 16, 70], MAX_NEW, seed=7), MAX_NEW)
    executor.close()


@pytest.mark.parametrize("architecture", [name for name, (*_, reason) in OTHER_MODELS.items() if reason])
def test_a_family_that_cannot_be_served_is_refused_with_the_reason(tmp_path: Path, architecture: str) -> None:
    folder = make_library_model(tmp_path, architecture)
    reason = OTHER_MODELS[architecture][-1]
    with pytest.raises(UnsupportedModelError, match=f"{architecture} cannot be served: .*{reason}"):
        load_executor(load_config(ModelSource(str(folder))), dtype="float32", num_slots=1, num_pages=4, page_size=16)


def test_these_families_are_not_in_the_table() -> None:
    assert not OTHER_MODELS.keys() & LIBRARY_MODELS.keys()
