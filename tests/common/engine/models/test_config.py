"""Model configurations: both spellings of rope, unsupported settings, damaged files and mismatched weights."""

import errno
import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file, save_file
from support.engine.reference_models import LLAMA3_ROPE, make_model

from common.cache.page_layout import PageLayout
from common.engine.factory import load_executor
from common.engine.models.config import Llama3Scaling, ModelConfig, RopeConfig, YarnScaling
from common.engine.models.implementation import ModelSource, load_config
from common.engine.models.layers import inverse_frequencies
from common.engine.models.transformers_impl.config import TransformersConfig
from common.errors import ConfigError, FetchError, UnsupportedModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "llama", num_hidden_layers=1, eos_token_id=5)


def rewrite(folder: Path, file: str = "config.json", **changes: Any) -> None:
    """Change keys of a JSON file; a value of None removes its key."""
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def load(folder: Path) -> ModelConfig:
    return ModelConfig.load(str(folder))


def executor(folder: Path) -> None:
    load_executor(load(folder), num_slots=1, num_pages=2, page_size=16).close()


def test_a_configuration_has_the_values_that_were_saved(folder: Path) -> None:
    config = load(folder)
    assert (config.num_layers, config.hidden_size) == (1, 48)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.vocab_size, config.context_length, config.dtype) == (211, 1024, "float32")
    assert not config.has_qk_norm
    assert config.layout(16, "bfloat16") == PageLayout(1, 2, 32, 16, "bfloat16")
    assert config.layout(16, "auto", "fp8") == PageLayout(1, 2, 32, 16, "fp8_e4m3")
    assert config.layout(16, "auto", "int8") == PageLayout(1, 2, 32, 16, "int8")
    assert config.layout(16, "auto").dtype == "float32"


def test_rope_is_read_from_the_old_spelling_and_from_the_new(folder: Path) -> None:
    expected = RopeConfig(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 128))
    rewrite(folder, rope_parameters=LLAMA3_ROPE)
    assert load(folder).rope == expected
    old = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    rewrite(folder, rope_parameters=None, rope_theta=500_000.0, rope_scaling=old)
    assert load(folder).rope == expected
    rewrite(folder, rope_scaling=None)
    assert load(folder).rope == RopeConfig(500_000.0)


def test_rope_is_overridden_in_either_spelling_whatever_that_of_the_file(folder: Path) -> None:
    def overridden(**overrides: Any) -> RopeConfig:
        return ModelConfig.load(str(folder), overrides=overrides).rope

    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    expected = RopeConfig(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 128))
    rewrite(folder, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    assert overridden(rope_scaling=scaling) == overridden(rope_parameters=LLAMA3_ROPE) == expected
    assert overridden(rope_theta=7.0) == RopeConfig(7.0)
    assert overridden(rope_theta=7.0, rope_scaling=LLAMA3_ROPE) == RopeConfig(7.0, expected.scaling)
    rewrite(folder, rope_parameters={"rope_theta": 500_000.0, "partial_rotary_factor": 0.5})
    for overrides in ({"rope_theta": 7.0}, {"rope_scaling": scaling}):
        with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
            overridden(**overrides)
    rewrite(folder, rope_parameters=None, rope_theta=500_000.0)
    assert overridden(rope_scaling=scaling) == overridden(rope_parameters=LLAMA3_ROPE) == expected
    assert overridden(rope_theta=7.0) == RopeConfig(7.0)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_overrides_switch_the_scaling_of_rope_off_whatever_the_spelling_of_the_file(
    folder: Path, spelling: str
) -> None:
    rewrite(folder, **{"rope_parameters": None, "rope_theta": 500_000.0, spelling: LLAMA3_ROPE})
    for overrides in (
        {"rope_scaling": None},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 500_000.0},
    ):
        assert ModelConfig.load(str(folder), overrides=overrides).rope == RopeConfig(500_000.0)


def test_overrides_of_keys_that_the_family_does_not_have_are_refused(folder: Path) -> None:
    rewrite(folder, mlp_bias=None, use_cache=True)
    for known in ({"num_hidden_layers": 1}, {"mlp_bias": True}, {"head_dim": 32}, {"use_cache": False}):
        ModelConfig.load(str(folder), overrides=known)
    for unknown in ("max_positions", "moe_intermediate_size"):
        with pytest.raises(ConfigError, match=f"--hf-overrides: {unknown} is not a key of this model's config.json"):
            ModelConfig.load(str(folder), overrides={unknown: 64, "mlp_bias": True})


def test_llama3_frequencies_are_kept_slowed_or_blended_by_wavelength() -> None:
    """Context 64 tokens, factors 1 and 4: wavelengths below 16 stay, above 64 are slowed by 8, between are blended."""
    rope = RopeConfig(10_000.0, Llama3Scaling(8.0, 1.0, 4.0, 64))
    plain = inverse_frequencies(RopeConfig(10_000.0), 16)
    found = inverse_frequencies(rope, 16)
    # 10000 ** (-i / 8): wavelengths 6.3, 19.9, 62.8, 198.7 ...
    assert found[0] == plain[0]
    smooth = (64 / (2 * torch.pi / plain[1]) - 1) / 3
    assert torch.isclose(found[1], (1 - smooth) * plain[1] / 8 + smooth * plain[1])
    assert torch.allclose(found[3:], plain[3:] / 8)


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 1.0},
        {"factor": None},
        {"original_max_position_embeddings": None},
        {"attention_factor": 0.7},
        {"mscale": 1.2, "mscale_all_dim": 0.7},
        {"mscale": 1.2},
        {"mscale": 0, "mscale_all_dim": 0.7, "beta_fast": 0},
        {"beta_fast": 8, "beta_slow": 2.5},
        {"beta_fast": 1, "beta_slow": 1, "truncate": False},
        {"truncate": False},
        {"original_max_position_embeddings": 10},
        {"rope_theta": 1_000_000.0, "original_max_position_embeddings": 32_768},
    ],
)
@pytest.mark.parametrize("head_dim", [32, 128])
def test_yarn_frequencies_equal_those_of_transformers(folder: Path, changes: dict[str, Any], head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {key: value for key, value in {**YARN, **changes}.items() if value is not None or key == "factor"}
    rewrite(folder, rope_parameters=parameters)
    config = LlamaConfig(
        head_dim=head_dim, num_attention_heads=4, max_position_embeddings=1024, rope_parameters={**parameters}
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    rope = load(folder).rope
    assert torch.equal(inverse_frequencies(rope, head_dim), frequencies)
    assert rope.attention_factor == attention_factor


def test_the_attention_factor_of_yarns_own_code_multiplies_the_default(folder: Path) -> None:
    """DeepSeek-R1-0528-Qwen3-8B gives the inverse of the default, so that scores stay as they are."""
    rewrite(folder, rope_parameters={**YARN, "attn_factor": 0.8782488562869419})
    assert load(folder).rope.attention_factor == pytest.approx(1.0)


def test_yarn_extends_the_context_if_the_original_length_is_given(folder: Path) -> None:
    """Model cards tell users to add only the scaling. The model was saved with a context of 1,024."""
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    rewrite(folder, rope_parameters=None, rope_theta=10_000.0, rope_scaling=old)
    assert load(folder).context_length == 4096
    assert load(folder).rope.scaling == YarnScaling(4.0, 1024, True, 32.0, 1.0, 0.1 * math.log(4) + 1, True)
    rewrite(folder, rope_scaling={"type": "yarn", "factor": 4.0})
    assert load(folder).context_length == 1024
    rewrite(folder, rope_scaling={**old, "original_max_position_embeddings": 100})
    assert load(folder).context_length == 1024


def test_end_tokens_come_from_both_files_without_duplicates(folder: Path) -> None:
    rewrite(folder, eos_token_id=[5, 7])
    rewrite(folder, "generation_config.json", eos_token_id=[9, 5])
    assert load(folder).eos_token_ids == (9, 5, 7)


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, "0.5"])
def test_a_generation_default_that_is_no_number_is_refused_by_key(folder: Path, value: Any) -> None:
    rewrite(folder, "generation_config.json", top_p=value)
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p should be a number, not"):
        load(folder)


def test_no_model_of_the_library_is_made_with_an_impossible_number_of_layers(folder: Path) -> None:
    rewrite(folder, num_hidden_layers=10**30)
    with pytest.raises(ConfigError, match="num_hidden_layers should be a positive integer up to 10000"):
        load_config(ModelSource(str(folder), implementation="transformers"))


def test_weights_of_the_wrong_shape_are_refused_before_they_take_memory(folder: Path) -> None:
    rewrite(folder, intermediate_size=2**31 - 1)
    with pytest.raises(ConfigError, match=r"down_proj\.weight is \[48, 80\], should be \[48, 2147483647\]"):
        executor(folder)


def test_generation_defaults_apply_with_and_without_do_sample(folder: Path) -> None:
    rewrite(folder, "generation_config.json", do_sample=False, temperature=0.6, top_k=20, top_p=0.95, max_length=9)
    assert load(folder).generation == {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95}


def test_the_digest_depends_on_configuration_and_shapes_not_on_the_folder(folder: Path, tmp_path: Path) -> None:
    digest = load(folder).digest
    assert len(digest) == 64
    moved = folder.rename(tmp_path / "elsewhere")
    assert load(moved).digest == digest
    rewrite(moved, rms_norm_eps=1e-5)
    assert load(moved).digest != digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "Mamba.*Qwen3For.*Qwen2For.*LlamaFor.*MistralFor"),
        ({"architectures": None, "model_type": "mamba"}, "model_type 'mamba'.*Qwen3ForCausalLM"),
        ({"quantization_config": {"quant_method": "gguf"}}, "quantized.*gguf.*fp8, compressed-tensors, awq, gptq"),
        ({"use_sliding_window": True}, "sliding window.*full attention"),
        ({"layer_types": ["sliding_attention"]}, "sliding window.*full attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic.*default, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "type of layer.*one for all"),
        ({"hidden_act": "gelu"}, "gelu.*silu"),
        ({"is_causal": False}, "is_causal"),
    ],
)
def test_an_unsupported_setting_is_refused_by_name(folder: Path, changes: dict[str, Any], words: str) -> None:
    rewrite(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=words):
        load(folder)


def test_mistrals_window_must_be_null_since_a_missing_key_means_4096(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "mistral", num_hidden_layers=1, head_dim=None)
    config = load(folder)
    assert (config.head_dim, config.has_qkv_bias, config.has_o_bias) == (12, False, False)
    rewrite(folder, sliding_window=4096)
    with pytest.raises(UnsupportedModelError, match="sliding windows are not supported; only"):
        load(folder)
    rewrite(folder, sliding_window=None)  # removes the key
    with pytest.raises(UnsupportedModelError, match="a missing sliding_window means 4096"):
        load(folder)


@pytest.mark.parametrize(("family", "kind"), [("mixtral", "MixtralConfig"), ("qwen3", "Qwen3Config")])
def test_missing_keys_have_the_values_that_transformers_gives_them(tmp_path: Path, family: str, kind: str) -> None:
    import transformers

    folder = make_model(tmp_path / "model", family, num_hidden_layers=1)
    rewrite(folder, rope_parameters=None, rms_norm_eps=None)
    config, expected = load(folder), getattr(transformers, kind)()
    assert (config.rms_norm_eps, config.rope) == (
        expected.rms_norm_eps,
        RopeConfig(expected.rope_parameters["rope_theta"]),
    )


def test_qwen2s_window_counts_only_if_it_is_enabled(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen2", num_hidden_layers=1)
    rewrite(folder, sliding_window=4096, use_sliding_window=False, max_window_layers=1, layer_types=None)
    config = load(folder)
    assert (config.has_qkv_bias, config.has_o_bias) == (True, False)
    executor(folder)
    rewrite(folder, use_sliding_window=True)
    with pytest.raises(UnsupportedModelError, match="sliding windows are not supported; only"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers should be a positive integer, not 0"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size.*'many'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers should be a positive integer up to 10000, not 1000"),
        ({"vocab_size": 2**40}, "vocab_size should be a positive integer up to 2147483647, not 1099511627776"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps should be a positive number, not nan"),
        ({"rope_theta": 10**400, "rope_parameters": None}, "rope_theta should be a positive number up to 1.79"),
        ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta should be above 1 with rope type yarn, not 1"),
        ({"rope_parameters": {**YARN, "factor": 1e30}}, "factor should be a positive number up to 8388607.996"),
        ({"eos_token_id": math.inf}, "eos_token_id .* a token id or a list of token ids, not inf"),
        ({"eos_token_id": [5, 1.5]}, "eos_token_id .* a token id or a list of token ids, not 1.5"),
    ],
)
def test_impossible_numbers_are_refused_by_key(folder: Path, changes: dict[str, Any], words: str) -> None:
    rewrite(folder, **changes)
    with pytest.raises(ConfigError, match=words):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": "<end>"},
        {"eos_token_id": [[1]]},
        {"quantization_config": "int4"},
        {"rope_scaling": "linear"},
        {"layer_types": 3},
        {"architectures": 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_values_of_a_wrong_type_are_refused_by_file(folder: Path, changes: dict[str, Any]) -> None:
    rewrite(folder, **changes)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(folder)


def test_a_checkpoint_without_tensors_or_with_a_wrong_index_is_refused(folder: Path) -> None:
    save_file({}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="hold no tensors"):
        load(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')
    with pytest.raises(ConfigError, match="weight_map"):
        load(folder)
    for name in ("../model.safetensors", "parts/../../model.safetensors", str(folder / "model.safetensors")):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ConfigError, match="not in the folder of the checkpoint"):
            load(folder)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "a/b/c", "", "~/nothing", "~nobody-here/model"])
def test_a_path_that_does_not_exist_is_refused_as_a_folder(path: str) -> None:
    with pytest.raises(ConfigError, match=r"--model.*no such folder"):
        ModelConfig.load(path)


def answer(status: int) -> Any:
    return SimpleNamespace(status_code=status, headers={}, request=None)


def not_in_the_cache(cause: Exception | None = None) -> Exception:
    """The error of the library after one that it does not pass on."""
    error = LocalEntryNotFoundError("no connection, and nothing in the cache")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "exit_status"),
    [
        (not_in_the_cache(), 1),
        (HTTPError("the connection broke, nothing in the cache"), 1),
        (not_in_the_cache(HfHubHTTPError("the hub is down", response=answer(503))), 1),
        (not_in_the_cache(HfHubHTTPError("forbidden", response=answer(403))), 2),
        (OSError(errno.ENOSPC, "no space left: nothing in the cache"), 1),
        (HfHubHTTPError("the hub is down: nothing in the cache", response=answer(503)), 1),
        (RepositoryNotFoundError("no such model, nothing in the cache", response=answer(404)), 2),
        (HFValidationError("no name of a model, nothing in the cache"), 2),
    ],
)
def test_only_a_hub_id_that_the_hub_refuses_is_a_mistake(
    error: Exception, exit_status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"--model someone/model: neither a local folder.*nothing in the ca") as found:
        ModelConfig.load("someone/model")
    assert found.value.exit_status == exit_status


def test_a_hub_that_fails_before_the_code_of_a_model_is_fetched_does_not_refuse_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(error: ConfigError) -> Any:
        raise error

    monkeypatch.setattr(ModelConfig, "load", lambda *_, **__: fail(UnsupportedModelError("unknown to Baton")))
    monkeypatch.setattr(TransformersConfig, "load", lambda *_, **__: fail(FetchError("no connection")))
    with pytest.raises(FetchError, match="no connection"):
        load_config(ModelSource("someone/model"))


def test_weights_that_a_repository_has_twice_are_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    used = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    unused = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/model.safetensors"]
    fetched: list[str] = []

    def download(_: str, *, revision: str | None, **patterns: Any) -> str:
        fetched.extend(filter_repo_objects(used + unused, **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match=r"there is no config\.json"):
        ModelConfig.load("someone/model")
    assert fetched == used


def test_damaged_files_are_named(folder: Path) -> None:
    without_offsets = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}'
    for header in (b"{not json", without_offsets):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(ConfigError, match=r"model\.safetensors: damaged"):
            load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"no \*\.safetensors"):
        load(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json: expected a JSON object"):
        load(folder)


def test_a_sharded_checkpoint_has_the_same_digest(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    whole = load(folder)
    names = sorted(tensors)
    parts = {"model-00001.safetensors": names[::2], "model-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load(folder).digest == whole.digest
    executor(folder)
    (folder / "model-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002\.safetensors: missing, although the index names it"):
        load(folder)


def test_a_whole_file_is_read_alone_whatever_is_beside_it(folder: Path) -> None:
    whole = load(folder)
    save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, folder / "consolidated.safetensors")
    stale = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(stale))
    assert load(folder).digest == whole.digest
    executor(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", r"model\.norm\.weight missing"),
        ("unexpected", r"model\.extra\.weight unexpected"),
        ("misshapen", r"model\.norm\.weight is \[47\], should be \[48\] of the wrong shape"),
    ],
)
def test_tensors_that_do_not_match_are_named(folder: Path, change: str, words: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    norm = tensors["model.norm.weight"]
    if change == "missing":
        del tensors["model.norm.weight"]
    elif change == "unexpected":
        tensors["model.extra.weight"] = norm.clone()
    else:
        tensors["model.norm.weight"] = norm[:47].clone()
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=words):
        executor(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "--dtype int8.*bfloat16"),
        ({"device": "tpu"}, "--device tpu"),
        ({"device": "cuda:31"}, "--device cuda:31"),
        ({"attention": "flash"}, "--attention-backend flash.*reference"),
    ],
)
def test_impossible_options_are_refused_by_flag(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_executor(load(folder), num_slots=1, num_pages=2, page_size=16, **options)


@pytest.mark.parametrize(
    "where", ["models.implementation.load_weights", "factory.KVPool", "factory.make_attention", "factory.TorchExecutor"]
)
def test_a_device_with_too_little_memory_is_refused_by_flag(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(f"common.engine.{where}", full)
    with pytest.raises(ConfigError, match=r"--device cpu.*Tried to allocate"):
        executor(folder)


def test_page_tables_that_do_not_fit_are_refused_by_flag(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("common.engine.executor.np.zeros", full)
    with pytest.raises(ConfigError, match="--context-length 1024: page tables do not fit into memory"):
        executor(folder)


def test_reading_a_configuration_needs_no_torch() -> None:
    code = "import sys, common.engine.models.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180, cwd=Path(__file__).parents[3])
