"""LoRA adapters: what is refused, and tokens equal to those of the merged models."""

import json
import os
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.devices import DEVICES
from support.engine.engine_driver import Driver
from support.engine.lora_adapters import ALL, make_adapter, merge
from support.engine.reference_models import FAMILIES, draw_prompts, make_model

from common.engine.cpu.kernels import load_kernels
from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig
from common.engine.models.lora.adapters import make_lora, native_adaptable
from common.engine.models.lora.checkpoint import Adaptable, read_adapter
from common.engine.triton_kernels import has_interpreter
from common.errors import ConfigError

LENGTHS, MAX_NEW = [1, 17, 64, 130], 8
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
NONE = torch.empty(0)
#: Adapters of one test, by the settings of each.
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"rank": 5, "alpha": 7.5, "targets": ("q_proj", "v_proj"), "use_rslora": True},
    "one": {"rank": 1, "alpha": 3, "targets": ("up_proj",)},
    "outputs": {"rank": 16, "alpha": 8, "targets": ("o_proj", "down_proj"), "layers_to_transform": [0, 1]},
    "patterns": {
        "rank_pattern": {r".*layers\.0\..*\.(q|k)_proj": 3, "down_proj": 12, "w2": 12},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 40, r".*\.[ov]_proj": 2},
    },
}
#: Adapters of all experts of a layer, in the form that PEFT writes for transformers 5.
EXPERT_KINDS: dict[str, dict[str, Any]] = {
    "parameters": {
        "rank": 4,
        "targets": ("q_proj",),
        "target_parameters": ["down_proj", "gate.weight", "gate_up_proj"],
        "rank_pattern": {r".*\.gate_up_proj": 8},
        "alpha_pattern": {r".*\.gate_up_proj": 32},
    },
    "one parameter": {"rank": 3, "targets": (), "target_parameters": ["mlp.experts.gate_up_proj"], "use_rslora": True},
}
MATRICES = ("gate_up", "down")  # of an expert
MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("lora-base"), "qwen3", seed=7)


def configure(folder: Path, **settings: Any) -> Path:
    """Change the configuration of an adapter, and nothing else."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


def read(folder: Path, model: Path, max_rank: int = 64, root: Path | None = None) -> Any:
    return read_adapter(folder, native_adaptable(ModelConfig.load(str(model))), max_rank=max_rank, root=root)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_folder_or_a_file_that_is_missing_is_named(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        read(tmp_path / "none", small)
    with pytest.raises(ConfigError, match=r"adapter_config\.json: missing"):
        read(tmp_path, small)
    folder = make_adapter(tmp_path / "a", small)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors: missing"):
        read(folder, small)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="is a pickle, which is not read"):
        read(folder, small)


def test_a_file_that_is_no_file_or_a_link_that_leaves_the_folder_is_refused(small: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "loras" / "a", small)
    outside = (folder / "adapter_model.safetensors").rename(tmp_path / "outside")
    (folder / "adapter_model.safetensors").symlink_to(outside)
    read(folder, small)
    with pytest.raises(ConfigError, match="is a link that leaves --lora-dir"):
        read(folder, small, root=(tmp_path / "loras").resolve())
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="missing"):
        read(folder, small)


def test_experts_that_the_model_does_not_have_are_refused_by_name(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "mixtral", num_local_experts=4)
    folder = make_adapter(tmp_path / "a", model, targets=("q_proj", "w1"))
    assert "model.layers.1.block_sparse_moe.experts.3.w1" in read(folder, model).pairs
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.4.w1.lora_A.weight"  # of four experts
    folder = make_adapter(tmp_path / "b", model, targets=("q_proj",), tensors={name: torch.zeros(8, 48)})
    with pytest.raises(ConfigError, match=r"experts\.4\.w1\.lora_A.* changes nothing"):
        read(folder, model)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_damaged_file_is_refused(small: Path, tmp_path: Path, damage: bytes) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        folder = make_adapter(tmp_path / file, small)
        (folder / file).write_bytes(damage)
        with pytest.raises(ConfigError, match=file):
            read(folder, small)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern 'q_proj' should be a positive integer"),
        ({"rank_pattern": {"q_proj": 65}}, "rank_pattern 'q_proj' is 65, and --max-lora-rank is 64"),
        ({"rank_pattern": {"(?<=a)": 4}}, "rank_pattern '(?<=a)': '?<=a)' at character 1 is not supported"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern should be an object"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern 'q_proj' should be a number"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "has 'mlp.experts.gate_up_proj'"),
        ({"target_parameters": "gate"}, "target_parameters should be a list"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"r": 0}, "r should be"),
        ({"r": "8"}, "r should be"),
        ({"r": 65}, "--max-lora-rank is 64"),
        ({"lora_alpha": None}, "lora_alpha should be"),
    ],
)
def test_a_setting_that_is_not_supported_is_refused_by_name(
    small: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read(configure(make_adapter(tmp_path / "a", small), **settings), small)
    assert said in str(error.value)


def test_an_adapter_may_have_a_pattern_for_each_matrix_of_a_large_model(small: Path, tmp_path: Path) -> None:
    ranks = {f"model.layers.{layer}.self_attn.{name}_proj": 3 for layer in range(230) for name in "qkvo"}
    found = read(make_adapter(tmp_path / "a", small, targets=("q_proj",), rank_pattern=ranks), small)
    assert [len(pair.a) for pair in found.pairs.values()] == [3, 3]
    with pytest.raises(ConfigError, match="rank_pattern has 1025 patterns; at most 1024 are read"):
        read(configure(tmp_path / "a", rank_pattern={str(number): 3 for number in range(1025)}), small)


@pytest.mark.parametrize("start", [False, "Gaussian", "eva", "orthogonal", "mica"])
def test_starts_that_leave_the_weights_of_the_model_are_read(small: Path, tmp_path: Path, start: bool | str) -> None:
    found = read(configure(make_adapter(tmp_path / "a", small), init_lora_weights=start), small)
    assert {len(pair.a) for pair in found.pairs.values()} == {8}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(8, 48)}, "lm_head.lora_A.weight changes nothing"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 211)}, "lora_embedding_A changes"),
        ({NAME.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(128)}, "lora_magnitude_vector changes"),
        ({NAME.replace("layers.0", "layers.2"): torch.zeros(8, 48)}, "layers.2.self_attn.q_proj.lora_A.weight changes"),
        ({NAME: torch.zeros(8, 49)}, "[8, 49] float32; a model of this shape and r 8 need [8, 48]"),
        ({NAME: torch.zeros(4, 48)}, "[4, 48] float32"),
        ({NAME: torch.zeros(8, 48, dtype=torch.int64)}, "int64"),
        ({NAME: NONE}, "model.layers.0.self_attn.q_proj is without its other half"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(
    small: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read(make_adapter(tmp_path / "a", small, tensors=tensors), small)
    assert said in str(error.value)


def test_an_adapter_without_tensors_and_one_that_is_too_large_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no tensors"):
        read(make_adapter(tmp_path / "empty", small, targets=()), small)
    folder = make_adapter(tmp_path / "large", small)
    with (folder / "adapter_model.safetensors").open("ab") as file:
        file.truncate(8 << 20)
    with pytest.raises(ConfigError, match="has more than the"):
        read(folder, small)
    with (folder / "adapter_config.json").open("ab") as file:
        file.truncate(2 << 20)
    with pytest.raises(ConfigError, match="which no configuration of an adapter has"):
        read(folder, small)


def test_an_adapter_of_many_small_matrices_is_read_although_names_are_most_of_it(tmp_path: Path) -> None:
    shapes = {f"model.layers.{index // 128}.mlp.experts.{index % 128}.up_proj": (1, 1) for index in range(6000)}
    tensors = {f"base_model.model.{name}.lora_{side}.weight": torch.ones(1, 1) for name in shapes for side in "AB"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["up_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert read_adapter(tmp_path, Adaptable(shapes), max_rank=1).pairs.keys() == shapes.keys()


# ---- what is computed ------------------------------------------------------------------------------------------------


def test_the_digest_depends_on_the_tensors_and_the_scale_alone(small: Path, tmp_path: Path) -> None:
    digests = [
        read(make_adapter(tmp_path / str(number), small, **settings), small).digest
        for number, settings in enumerate(({}, {"lora_dropout": 0.5}, {"alpha": 32}, {"seed": 1}, {"use_rslora": True}))
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    assert all(len(digest) == 32 for digest in digests)


def test_merged_parts_add_the_sum_of_their_products(small: Path, tmp_path: Path) -> None:
    model = ModelConfig.load(str(small))
    folder = make_adapter(tmp_path / "a", small, rank=3, alpha=6, targets=("q_proj", "v_proj", "down_proj"))
    lora = make_lora(read(folder, small), model, torch.float32, torch.device("cpu"))
    assert lora.additions.keys() == {(layer, matrix) for layer in range(2) for matrix in ("down", "qkv")}
    stored = load_file(folder / "adapter_model.safetensors")
    x = torch.randn(4, 48)
    added = lora.additions[1, "qkv"](x).split([128, 64, 64], dim=1)
    for part, name in zip(added, ("q_proj", None, "v_proj"), strict=True):
        if name is None:
            assert part.count_nonzero() == 0
            continue
        prefix = f"base_model.model.model.layers.1.self_attn.{name}.lora_"
        expected = 2 * x @ stored[f"{prefix}A.weight"].T @ stored[f"{prefix}B.weight"].T
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)


def test_the_matrices_of_an_adapter_share_huge_pages(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mapping takes at least one of 2 MiB."""
    sizes: list[int] = []

    def mapped(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr("common.engine.cpu.huge_pages._mapped", mapped)
    adapter = read(make_adapter(tmp_path / "a", small), small)
    lora = make_lora(adapter, ModelConfig.load(str(small)), torch.float32, torch.device("cpu"))
    assert len(lora.additions) == 8
    assert len(sizes) <= 1  # none where no kernel packs them


class Case(NamedTuple):
    adapter: str  # empty: the model itself
    prompt: tuple[int, ...]
    expected: tuple[int, ...]


def targets_of(family: str, targets: tuple[str, ...] = ALL) -> tuple[str, ...]:
    """Return the names of matrices in a family's checkpoints; with the router, if all are meant."""
    router = ("gate",) if targets == ALL and family in ("mixtral", "qwen3_moe") else ()
    return *((MIXTRAL_NAMES.get(name, name) if family == "mixtral" else name) for name in targets), *router


def kinds_of(family: str) -> dict[str, dict[str, Any]]:
    return KINDS | EXPERT_KINDS if family in ("mixtral", "qwen3_moe") else KINDS


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Case]]:
    """A model's folder, below it adapters of each kind, and greedy outputs of the merged models."""
    family, overrides = FAMILIES[request.param]
    root = tmp_path_factory.mktemp(f"lora-{request.param}")
    folder = make_model(root / "model", family, seed=11, **overrides)
    cases = [Case("", *case) for case in draw_prompts(folder, LENGTHS, MAX_NEW, seed=3)]
    for seed, (name, settings) in enumerate(kinds_of(family).items()):
        targets = targets_of(family, settings.get("targets", ALL))
        adapter = make_adapter(root / name, folder, seed=seed, **{**settings, "targets": targets})
        merged = merge(root / f"merged-{name}", folder, adapter)
        cases += [Case(name, *case) for case in draw_prompts(merged, LENGTHS, MAX_NEW, seed=3)]
    return root, cases


def is_row_by_row() -> bool:
    """Whether bfloat16 is multiplied by our own kernel here."""
    kernels = load_kernels()
    return kernels is not None and kernels.can_multiply(torch.empty(16, 16, dtype=torch.bfloat16))


def load(root: Path, **options: Any) -> TorchExecutor:
    settings = {"device": "cpu", "dtype": "float32", "num_slots": 32, "num_pages": 400, "page_size": 16, **options}
    executor = load_executor(ModelConfig.load(str(root / "model")), **settings)
    for name in {file.parent.name for file in root.glob("*/adapter_config.json")}:
        executor.adapters[name] = executor.read_adapter(root / name, max_rank=64)
    return executor


def test_an_adapter_that_does_not_fit_into_the_memory_of_the_device_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB\nand more")

    monkeypatch.setattr("common.engine.models.decoder.make_lora", full)
    executor = load_executor(ModelConfig.load(str(small)), num_slots=1, num_pages=2, page_size=16)
    with pytest.raises(ConfigError, match=r"/a: the device .* lower --memory-fraction .*Tried to allocate 2 MiB\)"):
        executor.read_adapter(make_adapter(tmp_path / "a", small), max_rank=64)
    executor.close()


@pytest.mark.slow(sample=0.15)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [0, 16])
def test_requests_of_the_model_and_of_several_adapters_in_one_batch_equal_the_merged_models(
    served: tuple[Path, list[Case]], chunk: int, device: str
) -> None:
    root, cases = served
    assert len({case.expected for case in cases if len(case.prompt) == LENGTHS[-1]}) == len(cases) // len(LENGTHS)
    driver = Driver(load(root, device=device))
    texts = [driver.start(slot, case.prompt, adapter=case.adapter) for slot, case in enumerate(cases)]
    assert driver.finish(texts, MAX_NEW, chunk) == [case.expected for case in cases]
    driver.executor.close()


@pytest.mark.slow
@pytest.mark.skipif(not (has_interpreter() and find_spec("triton")), reason="needs Triton's interpreter")
@pytest.mark.parametrize("served", ["qwen3_moe", "mixtral"], indirect=True)
def test_in_triton_requests_with_adapters_of_experts_equal_the_merged_models(
    served: tuple[Path, list[Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from common.engine.triton_kernels.grouped_linear import GroupedExperts

    monkeypatch.setattr("common.engine.models.decoder.make_expert_product", GroupedExperts)
    root, cases = served
    cases = [case for case in cases if len(case.prompt) == 17]
    driver = Driver(load(root))
    assert driver.executor.adapters["all"].stacks.keys() == {(layer, kind) for layer in (0, 1) for kind in MATRICES}
    texts = [driver.start(slot, case.prompt, adapter=case.adapter) for slot, case in enumerate(cases)]
    assert driver.finish(texts, 3, chunk=30) == [case.expected[:3] for case in cases]  # the interpreter is slow
    driver.executor.close()


@pytest.mark.slow(sample=0.15)
def test_a_request_alone_equals_the_merged_model(served: tuple[Path, list[Case]]) -> None:
    root, cases = served
    executor = load(root)
    for case in cases:
        driver = Driver(executor)
        text = driver.start(3, case.prompt, adapter=case.adapter)
        assert driver.finish([text], MAX_NEW) == [case.expected]
    executor.close()


@pytest.mark.slow(sample=0.3)
def test_an_adapter_that_is_dropped_takes_no_memory_any_more(served: tuple[Path, list[Case]]) -> None:
    root, cases = served
    driver = Driver(load(root))
    texts = [driver.start(slot, case.prompt, adapter=case.adapter) for slot, case in enumerate(cases)]
    driver.finish(texts, 1)
    dropped = weakref.ref(driver.executor.adapters["all"])
    driver.executor.drop_adapter("all")
    assert dropped() is None
    left = [(text, case) for text, case in zip(texts, cases, strict=True) if case.adapter != "all"]
    driver.finish([text for text, _ in left], MAX_NEW)
    assert [tuple(text.output) for text, _ in left] == [case.expected for _, case in left]
    driver.executor.close()


@pytest.mark.slow(sample=0.15)
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"weight_dtype": "int8"}])
def test_in_any_format_the_next_token_is_mostly_that_of_the_merged_model(
    served: tuple[Path, list[Case]], options: dict[str, str]
) -> None:
    """The weights are random, so that the highest logits are close; another adapter agrees by chance only."""
    root, cases = served
    executor = load(root, **options)
    num_equal = num_asked = 0
    for case in cases:
        for count, token in enumerate(case.expected):
            driver = Driver(executor)
            text = driver.start(0, case.prompt + case.expected[:count], adapter=case.adapter)
            driver.finish([text], 1)
            num_equal += text.output == [token]
            num_asked += 1
    executor.close()
    assert num_equal > 0.8 * num_asked, f"{num_equal} of {num_asked}"


@pytest.mark.slow(sample=0.15)
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"weight_dtype": "int8"}])
def test_tokens_do_not_depend_on_the_adapters_of_other_rows(
    served: tuple[Path, list[Case]], options: dict[str, str]
) -> None:
    """Also where rounding keeps them from equalling the merged model: each request runs alone, and then beside all."""
    root, cases = served
    executor = load(root, **options)
    if options == {"dtype": "bfloat16"} and not is_row_by_row():
        pytest.skip("oneDNN's product depends on the number of rows")
    alone = []
    for case in cases:
        driver = Driver(executor)
        text = driver.start(0, case.prompt, adapter=case.adapter)
        driver.finish([text], MAX_NEW)
        alone.append(text.output)
    driver = Driver(executor)
    texts = [driver.start(slot, case.prompt, adapter=case.adapter) for slot, case in enumerate(cases)]
    driver.finish(texts, MAX_NEW)
    assert [text.output for text in texts] == alone
    executor.close()


def test_a_stored_configuration_may_name_the_matrices_in_any_way(small: Path, tmp_path: Path) -> None:
    whole = [f"model.layers.{layer}.self_attn.q_proj" for layer in (1, 0)]  # as PEFT writes it for all-linear
    several = ["q_proj", "c_attn"]  # PEFT skips names that a model does not have
    for number, targets in enumerate(("all-linear", r".*\.q_proj", ["self_attn.q_proj"], ["q_proj"], whole, several)):
        folder = make_adapter(tmp_path / str(number), small, targets=("q_proj",))
        assert read(configure(folder, target_modules=targets), small).pairs.keys() == {
            f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)
        }
