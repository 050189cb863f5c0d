"""A checkpoint with a model class of its own is served with ``--trust-remote-code``, and refused without it."""

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from support.engine.engine_driver import check_tokens
from support.engine.reference_models import TINY, draw_prompts, draw_weights

from common.engine.factory import load_executor
from common.engine.models.implementation import ModelSource, load_config
from common.engine.models.transformers_impl.attention import freeze_rope
from common.errors import UnsupportedModelError

MAX_NEW = 6
CONFIG = """
from transformers import LlamaConfig


class GatedConfig(LlamaConfig):
    model_type = "gated_test"
"""
#: The layers of Llama, with a gate after attention and without rotary embeddings.
MODEL = """
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .gated_config import GatedConfig


class GatedAttention(nn.Module):
    is_causal = True
    attention_dropout = 0.0

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        wide, narrow = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj, self.gate = (nn.Linear(config.hidden_size, wide, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(config.hidden_size, narrow, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, position_embeddings=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (one(hidden_states).view(shape).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, weights = attend(self, q, k, v, attention_mask, scaling=self.head_dim**-0.5, dropout=0.0, **kwargs)
        attended = attended.reshape(*hidden_states.shape[:-1], -1) * torch.sigmoid(self.gate(hidden_states))
        return self.o_proj(attended), weights


class GatedForCausalLM(LlamaForCausalLM):
    config_class = GatedConfig

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = GatedAttention(config, index)
        self.post_init()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with code; the library keeps copies of such code in a cache, which is below ``tmp_path`` here."""
    from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

    monkeypatch.setattr(sys, "path", [*sys.path])  # the library adds its cache
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "gated"
    folder.mkdir()
    (folder / "gated_config.py").write_text(CONFIG)
    (folder / "gated_model.py").write_text(MODEL)
    classes = {"AutoConfig": "gated_config.GatedConfig", "AutoModelForCausalLM": "gated_model.GatedForCausalLM"}
    stored = {**TINY, "model_type": "gated_test", "architectures": ["GatedForCausalLM"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(stored))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    draw_weights(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


def test_tokens_equal_those_of_the_checkpoint_s_own_class_and_the_log_warns_of_its_code(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=True
    ).eval()
    assert reference.model.layers[0].self_attn.gate.weight.any()
    cases = draw_prompts(reference, [1, 16, 70], MAX_NEW, seed=5)
    with caplog.at_level(logging.INFO):
        config = load_config(ModelSource(str(folder), trust_remote_code=True))
        executor = load_executor(config, dtype="float32", num_slots=8, num_pages=60, page_size=16)
    check_tokens(executor, cases, MAX_NEW)
    executor.close()
    warnings = [record for record in caplog.records if "--trust-remote-code" in record.getMessage()]
    assert [record.levelno for record in warnings] == [logging.WARNING] * 2
    for record, name in zip(warnings, ("gated_config.GatedConfig", "gated_model.GatedForCausalLM"), strict=True):
        assert f"({name}) runs in this process" in record.getMessage()
    assert "checking a reduced copy of GatedForCausalLM" in caplog.text


def test_without_the_flag_the_checkpoint_is_refused_and_the_flag_is_named(folder: Path) -> None:
    (folder / "gated_config.py").write_text("raise AssertionError('this code runs')")
    with pytest.raises(UnsupportedModelError) as error:
        load_config(ModelSource(str(folder), implementation="transformers"))
    assert str(error.value) == (
        f"{folder}: this model is computed by Python code of the checkpoint; it needs --trust-remote-code, "
        "and runs that code"
    )


def test_a_damaged_key_of_a_known_type_is_named_although_the_checkpoint_has_code(folder: Path) -> None:
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, "model_type": "llama", "num_attention_heads": "x"}))
    with pytest.raises(UnsupportedModelError, match="num_attention_heads") as error:
        load_config(ModelSource(str(folder), implementation="transformers"))
    assert "--trust-remote-code" not in str(error.value)


def test_code_of_a_model_that_is_refused_before_it_runs_is_not_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = json.loads((folder / "config.json").read_text())
    del stored["auto_map"]["AutoConfig"]
    (folder / "config.json").write_text(json.dumps({**stored, "model_type": "llama"}))
    (folder / "gated_model.py").write_text("raise AssertionError('this code runs')")
    with caplog.at_level(logging.INFO), pytest.raises(UnsupportedModelError, match="not those of a LlamaForCausalLM"):
        load_config(ModelSource(str(folder), implementation="transformers", trust_remote_code=True))
    assert "--trust-remote-code" not in caplog.text


def test_a_checkpoint_without_code_runs_none_and_nothing_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = json.loads((folder / "config.json").read_text())
    del stored["auto_map"]
    (folder / "config.json").write_text(json.dumps({**stored, "model_type": "llama"}))
    with caplog.at_level(logging.INFO), pytest.raises(UnsupportedModelError, match="not those of a LlamaForCausalLM"):
        load_config(ModelSource(str(folder), implementation="transformers", trust_remote_code=True))
    assert "--trust-remote-code" not in caplog.text


def test_a_rotary_embedding_without_a_configuration_keeps_its_frequencies() -> None:
    rotary = torch.nn.Module()
    rotary.rope_type = "dynamic"  # type: ignore[assignment]
    freeze_rope(rotary)
    assert rotary.rope_type == "default"
