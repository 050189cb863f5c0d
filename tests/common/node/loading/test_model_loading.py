"""Nodes that compute in different formats have different weight versions; a node has no more threads than CPUs."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from support.service.service import SMALL_MODEL

from common.config.node import NodeConfig
from common.engine.executor import TorchExecutor
from common.engine.models.config import ModelConfig
from common.errors import ConfigError
from common.node.loading import model_loading
from common.node.loading.device_plan import activation_bytes, plan_reserve
from common.node.loading.memory_plan import plan_capacity
from common.node.loading.model_loading import compute_threads, formats, load_model, takes_all_cpus, with_context_length
from common.node.tensor_parallel.rank_processes import RankProcesses


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"dtype": "bfloat16"}, []),  # the format of its pages says so
        ({"weight_dtype": "int8"}, ["int8"]),
        ({"kv_cache_dtype": "int8"}, []),  # as without it: the gateway refuses a node for its pages, and says so
        ({"kv_cache_dtype": "int8", "dtype": "bfloat16"}, []),  # as the checkpoint
        ({"kv_cache_dtype": "int8", "dtype": "float32"}, ["float32"]),
        ({"kv_cache_dtype": "int8", "dtype": "float32", "weight_dtype": "int4"}, ["int4", "float32"]),
    ],
)
def test_a_weight_version_names_the_formats_that_pages_do_not_show(
    options: dict[str, str], expected: list[str]
) -> None:
    config = NodeConfig(model=str(SMALL_MODEL), **options)  # type: ignore[arg-type]
    assert formats(config, ModelConfig.load(SMALL_MODEL)) == expected


def test_a_shorter_context_bounds_what_a_node_plans_for_and_a_longer_one_is_refused() -> None:
    model = ModelConfig.load(SMALL_MODEL)
    assert with_context_length(NodeConfig(), model) == model
    config = NodeConfig(context_length=64, chunked_prefill_size=-1, max_prefill_tokens=16)
    shorter = with_context_length(config, model)
    layout = shorter.layout(16, "auto")
    capacity = plan_capacity(config, layout, device="cuda", context_length=shorter.context_length)
    assert (capacity.context_length, capacity.num_pages) == (64, 256 * 64 // 16)
    steps = [plan_reserve(config, one, layout, capacity, ()).step for one in (shorter, model)]
    assert steps[1] - steps[0] == (model.context_length - 64) * activation_bytes(model, 2)
    with pytest.raises(ConfigError, match=f"--context-length 4097 is more than the {model.context_length} tokens"):
        with_context_length(NodeConfig(context_length=4097), model)


def test_the_end_token_of_the_tokenizer_ends_outputs_too(tmp_path: Path) -> None:
    """A fine-tune of a base model may name the end of a turn in no other file."""
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    shutil.copytree(SMALL_MODEL, model)
    for file in (model / "config.json", model / "generation_config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 5}))
    assert ModelConfig.load(str(model)).eos_token_ids == (5,)
    assert model_loading._load_model_config(NodeConfig(model=str(model))).eos_token_ids == (5, 1023)
    tokenizer.mkdir()
    added = [{"id": 3, "content": "<s>"}, {"id": 4, "content": "</s>"}]
    (tokenizer / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    config = NodeConfig(model=str(model), tokenizer=str(tokenizer))
    assert model_loading._load_model_config(config).eos_token_ids == (5, 4)
    (tokenizer / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')
    assert model_loading._load_model_config(config).eos_token_ids == (5, 3)
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "</s>", "added_tokens_decoder": {}}')
    assert model_loading._load_model_config(config).eos_token_ids == (5, 4)
    (tokenizer / "special_tokens_map.json").unlink()
    for damaged in (b"{", b"[]", b'{"eos_token": 5}', b'{"eos_token": "\xff"}'):
        (tokenizer / "tokenizer_config.json").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: cannot be read as JSON"):
            model_loading._load_model_config(config)
    (tokenizer / "tokenizer_config.json").unlink()
    assert model_loading._load_model_config(config).eos_token_ids == (5,)


def test_a_node_fetches_all_files_of_a_tokenizer_that_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eos = {"eos_token": "</s>"}
    files = {"tokenizer.json": {"added_tokens": [{"id": 4, "content": "</s>"}]}, "special_tokens_map.json": eos}

    def download(*_: object, allow_patterns: list[str], **__: object) -> str:
        for name in set(files) & set(allow_patterns):
            (tmp_path / name).write_text(json.dumps(files[name]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = NodeConfig(model=str(SMALL_MODEL), tokenizer="someone/tokenizer")
    assert model_loading._load_model_config(config).eos_token_ids[-1] == 4


def test_a_node_loads_its_model_with_a_shorter_context() -> None:
    config = NodeConfig(model=str(SMALL_MODEL), device="cpu", context_length=20, max_total_tokens=64)
    model, executor, capacity = load_model(config, RankProcesses(1, ""))
    executor.close()
    assert (model.context_length, capacity.context_length, capacity.num_pages) == (20, 20, 4)


def test_a_device_without_memory_for_the_first_step_is_refused_by_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: TorchExecutor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB\nand more")

    monkeypatch.setattr(TorchExecutor, "warm_up", full)
    config = NodeConfig(model=str(SMALL_MODEL), device="cpu", context_length=20, max_total_tokens=64)
    with pytest.raises(ConfigError, match=r"for a step .* lower --memory-fraction .*Tried to allocate 2 MiB\)"):
        load_model(config, RankProcesses(1, ""))


def test_a_node_with_more_threads_than_cpus_is_refused_before_its_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    config = NodeConfig(model=str(SMALL_MODEL), device="cpu", threads=3)
    with pytest.raises(ConfigError, match=r"--threads 3: this process may use 2 CPUs.* give at most 2"):
        load_model(config, RankProcesses(1, ""))


@pytest.mark.parametrize(("threads", "expected"), [(None, 2), (1, 1), (2, 2), (4, 4)])
def test_a_node_has_a_thread_for_each_core_by_default(
    monkeypatch: pytest.MonkeyPatch, threads: int | None, expected: int
) -> None:
    """Two hardware threads of a core count once; as many threads as these may be asked for."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(model_loading, "usable_cores", lambda: [(0, 2), (1, 3)])
    config = NodeConfig(model=str(SMALL_MODEL), threads=threads)
    assert compute_threads(config, "cpu") == expected
    assert takes_all_cpus(config) == (expected == 4)


def test_on_a_gpu_threads_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "usable_cores", lambda: [(0,)])
    assert compute_threads(NodeConfig(model=str(SMALL_MODEL), threads=3), "cuda") == 3
