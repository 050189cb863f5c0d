"""Several ranks give the greedy float32 tokens of transformers, for every family, with divided and shared KV heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.engine.engine_driver import Driver
from support.engine.rank_threads import RankThreads
from support.engine.reference_models import EXPERTS, LLAMA3_ROPE, draw_prompts, make_model

from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig

LENGTHS = [1, 17, 70]
MAX_NEW = 4


@contextmanager
def executor_of(folder: Path, num_ranks: int, attention: str = "auto", page_size: int = 16) -> Iterator[TorchExecutor]:
    config = ModelConfig.load(str(folder))
    ranks = RankThreads(config, num_ranks, attention)
    try:
        executor = load_executor(
            config,
            dtype="float32",
            num_slots=8,
            num_pages=400 // page_size,
            page_size=page_size,
            attention=attention,
            ranks=ranks,
        )
        yield executor
        executor.close()
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("family", "overrides", "num_ranks", "attention", "page_size"),
    [
        ("qwen3", {"tie_word_embeddings": True}, 2, "auto", 16),
        ("qwen3", {}, 4, "auto", 1),
        ("qwen2", {"num_key_value_heads": 4}, 4, "torch", 16),
        ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}, 2, "reference", 64),
        ("mistral", {"head_dim": None, "num_key_value_heads": 1}, 4, "auto", 16),
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0]}, 2, "auto", 16),
        ("mixtral", {"num_local_experts": 4}, 4, "auto", 16),
    ],
)
def test_tokens_equal_those_of_transformers(
    tmp_path: Path, family: str, overrides: dict[str, Any], num_ranks: int, attention: str, page_size: int
) -> None:
    folder = make_model(tmp_path, family, seed=7, **overrides)
    prompts = draw_prompts(folder, LENGTHS, MAX_NEW, seed=7)
    with executor_of(folder, num_ranks, attention, page_size) as executor:
        driver = Driver(executor)
        texts = [driver.start(slot, prompt) for slot, (prompt, _) in enumerate(prompts)]
        driver.step((texts[2], 48))  # a step that samples nothing
        assert driver.finish(texts, MAX_NEW, chunk=48) == [expected for _, expected in prompts]
