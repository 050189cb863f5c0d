"""LoRA adapters on several ranks give the greedy float32 tokens of the merged models, those of one rank."""

import gc
from pathlib import Path
from typing import Any

import pytest
from support.engine.engine_driver import Driver
from support.engine.lora_adapters import ALL, make_adapter, merge
from support.engine.rank_threads import RankThreads
from support.engine.reference_models import EXPERTS, draw_prompts, make_model

from common.engine.factory import load_executor
from common.engine.models.implementation import ModelSource, load_config
from common.errors import ConfigError

LENGTHS = [1, 17, 70]
MAX_NEW = 4
MIXTRAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "w1", "w2", "w3")


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize(
    ("family", "overrides", "num_ranks", "targets"),
    [
        ("qwen3", {"tie_word_embeddings": True}, 2, ALL),
        ("qwen2", {"num_key_value_heads": 1}, 4, ALL),  # ranks share a KV head
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0]}, 2, (*ALL, "gate")),
        ("mixtral", {"num_local_experts": 4}, 2, MIXTRAL),
    ],
)
def test_adapters_in_one_batch_equal_the_merged_models_on_one_rank_and_on_several(
    tmp_path: Path, family: str, overrides: dict[str, Any], num_ranks: int, targets: tuple[str, ...]
) -> None:
    """One of the adapters is read at start, and one while requests run; both are dropped at the end."""
    folder = make_model(tmp_path / "model", family, seed=7, **overrides)
    settings: dict[str, dict[str, Any]] = {
        "a": {"targets": targets, "seed": 1},
        "b": {"targets": ("q_proj", "o_proj"), "seed": 2, "rank": 3, "use_rslora": True},
    }
    if "gate" in targets:
        settings["b"]["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "gate.weight"]
        settings["b"]["rank_pattern"] = {"gate_up_proj": 5}
    cases = [("", *case) for case in draw_prompts(folder, LENGTHS, MAX_NEW, seed=7)]
    for name, some in settings.items():
        merged = merge(tmp_path / f"merged-{name}", folder, make_adapter(tmp_path / name, folder, **some))
        cases += [(name, *case) for case in draw_prompts(merged, LENGTHS, MAX_NEW, seed=7)]
    config = load_config(ModelSource(str(folder)))
    for number in (1, num_ranks):
        ranks = RankThreads(config, number)
        try:
            executor = load_executor(
                config, dtype="float32", num_slots=16, num_pages=100, page_size=16, ranks=ranks if number > 1 else None
            )
            executor.adapters["a"] = executor.read_adapter(tmp_path / "a", max_rank=8)
            driver = Driver(executor)
            first = [driver.start(slot, prompt, adapter=name) for slot, (name, prompt, _) in enumerate(cases[:6])]
            driver.step(*((text, 16) for text in first))
            executor.adapters["b"] = executor.read_adapter(tmp_path / "b", max_rank=8)
            later = [driver.start(6 + slot, prompt, adapter=name) for slot, (name, prompt, _) in enumerate(cases[6:])]
            driver.finish([*first, *later], MAX_NEW, chunk=16)
            assert [tuple(text.output) for text in (*first, *later)] == [expected for *_, expected in cases]
            assert [len(rank._adapters) for rank in ranks.executors] == [2] * (number - 1)
            del first, later
            executor.drop_adapter("a")
            executor.drop_adapter("b")
            gc.collect()
            assert [len(rank._adapters) for rank in ranks.executors] == [0] * (number - 1)
            text = driver.start(0, cases[0][1])
            assert driver.finish([text], MAX_NEW) == [cases[0][2]]
            executor.close()
        finally:
            ranks.close()


def test_an_adapter_that_changes_while_ranks_read_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "model")
    config = load_config(ModelSource(str(folder)))
    adapter = make_adapter(tmp_path / "a", folder)
    ranks = RankThreads(config, 2)
    try:
        executor = load_executor(config, dtype="float32", num_slots=2, num_pages=20, page_size=16, ranks=ranks)
        read = ranks.read_adapter

        def change_and_read(*args: Any, **options: Any) -> None:
            make_adapter(adapter, folder, seed=9)
            read(*args, **options)

        monkeypatch.setattr(ranks, "read_adapter", change_and_read)
        with pytest.raises(ConfigError, match="has changed while it was loaded"):
            executor.read_adapter(adapter, max_rank=8)
        assert ranks.executors[0]._adapters == {}
        executor.close()
    finally:
        ranks.close()
