"""Greedy float32 tokens equal those of transformers for every family, page size, chunk size, prefix and batch."""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.engine.devices import DEVICES
from support.engine.engine_driver import Driver
from support.engine.reference_models import EXPERTS, LLAMA3_ROPE, YARN_ROPE, draw_prompts, make_model

from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig
from common.engine.triton_kernels import has_interpreter

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3_tied_with_bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 12}),
    "llama_tied_with_bias": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2_tied_with_yarn": (
        "qwen2",
        {"tie_word_embeddings": True, "rope_parameters": {**YARN_ROPE, "truncate": False, "beta_fast": 16}},
    ),
    "mistral": ("mistral", {"head_dim": None}),
    "mistral_with_yarn": ("mistral", {"rope_parameters": {**YARN_ROPE, "attention_factor": 0.8}}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "attention_bias": True}),
    "qwen3_moe_with_a_dense_layer": (
        "qwen3_moe",
        {**EXPERTS, "norm_topk_prob": False, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}
LENGTHS = [1, 2, 15, 16, 17, 64, 100, 333, 600]
MAX_NEW = 10


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a name to (folder, [(prompt, expected)] of LENGTHS); it makes each model once."""

    @cache
    def make(name: str) -> tuple[Path, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
        family, overrides = MODELS[name]
        folder = make_model(tmp_path_factory.mktemp(name), family, seed=7, **overrides)
        return folder, draw_prompts(folder, LENGTHS, MAX_NEW, seed=7)

    return make


def load(
    folder: Path,
    device: str,
    page_size: int,
    attention: str = "auto",
    num_tokens: int = 2_000,
    dtype: str = "float32",
) -> TorchExecutor:
    return load_executor(
        ModelConfig.load(str(folder)),
        device=device,
        dtype=dtype,
        num_slots=16,
        num_pages=num_tokens // page_size + 16,
        page_size=page_size,
        attention=attention,
    )


def every_case() -> Iterator[Any]:
    """On the CPU every pair of model, page size and chunk size; on CUDA all cases."""
    for case in product(enumerate(MODELS), enumerate((1, 16, 64)), enumerate((0, 16, 100))):
        numbers, (name, page_size, chunk) = zip(*case, strict=True)
        for device in ("cpu", "cuda"):
            if device == "cuda" or sum(numbers) % 3 == 0:
                marks = pytest.mark.cuda if device == "cuda" else ()
                yield pytest.param(name, page_size, chunk, device, marks=marks)


@pytest.mark.slow(sample=0.35)
@pytest.mark.parametrize(("name", "page_size", "chunk", "device"), list(every_case()))
def test_tokens_equal_those_of_transformers_in_one_batch(
    models: Any, name: str, page_size: int, chunk: int, device: str
) -> None:
    folder, prompts = models(name)
    driver = Driver(load(folder, device, page_size))
    texts = [driver.start(slot, prompt) for slot, (prompt, _) in enumerate(prompts)]
    assert driver.finish(texts, MAX_NEW, chunk) == [expected for _, expected in prompts]
    driver.executor.close()


@pytest.mark.parametrize("stored", ["both, equal", "both, different", "the projection alone"])
def test_tied_weights_are_those_that_transformers_ties(tmp_path: Path, stored: str) -> None:
    folder = make_model(tmp_path, "qwen2", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.flip(0) if stored == "both, different" else embedding.clone()
    if stored == "the projection alone":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = draw_prompts(folder, [16, 33], MAX_NEW)
    driver = Driver(load(folder, "cpu", page_size=16))
    texts = [driver.start(slot, prompt) for slot, (prompt, _) in enumerate(prompts)]
    assert driver.finish(texts, MAX_NEW) == [expected for _, expected in prompts]
    driver.executor.close()


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_do_not_change_when_a_request_runs_alone(models: Any, name: str, device: str) -> None:
    folder, prompts = models(name)
    executor = load(folder, device, page_size=16)
    for prompt, expected in prompts:
        driver = Driver(executor)
        text = driver.start(3, prompt)
        assert driver.finish([text], MAX_NEW) == [expected]
    executor.close()


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "bfloat16"), *(pytest.param("cuda", dtype, marks=pytest.mark.cuda) for dtype in ("bfloat16", "float16"))],
)
def test_greedy_tokens_in_16_bits_mostly_agree_with_float32(models: Any, device: str, dtype: str) -> None:
    """One token is sampled after each beginning of the float32 outputs, so that no difference leads to others.

    The weights are random, so that the highest logits are close; a wrong kernel agrees by chance only, in one of 211.
    """
    folder, prompts = models("qwen3")
    executor = load(folder, device, page_size=16, dtype=dtype)
    num_equal = num_asked = 0
    for prompt, expected in prompts[:7]:
        for count, token in enumerate(expected[:5]):
            text = Driver(executor).start(0, prompt + expected[:count])
            text._driver.finish([text], 1)
            num_equal += text.output == [token]
            num_asked += 1
    executor.close()
    assert num_equal > 0.9 * num_asked, f"{num_equal} of {num_asked}"


@pytest.mark.parametrize("attention", ["reference", "torch"])
def test_tokens_do_not_depend_on_the_attention_backend(models: Any, attention: str) -> None:
    folder, prompts = models("llama3")
    driver = Driver(load(folder, "cpu", page_size=16, attention=attention))
    texts = [driver.start(slot, prompt) for slot, (prompt, _) in enumerate(prompts[:7])]
    assert driver.finish(texts, MAX_NEW, chunk=32) == [expected for _, expected in prompts[:7]]
    driver.executor.close()


@pytest.mark.slow
@pytest.mark.skipif(not (has_interpreter() and find_spec("triton")), reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe_with_a_dense_layer"])
def test_triton_kernels_give_the_same_tokens(models: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All of Triton's kernels take part, as on a GPU; prompts are computed in chunks beside decode rows."""
    from common.engine.triton_kernels.elementwise import TritonOperations
    from common.engine.triton_kernels.grouped_linear import GroupedExperts

    monkeypatch.setattr("common.engine.models.decoder.make_operations", lambda *_: TritonOperations())
    monkeypatch.setattr("common.engine.models.decoder.make_expert_product", GroupedExperts)
    folder, cases = models(name)
    driver = Driver(load(folder, "cpu", page_size=16, attention="triton"))
    cases = [case for case in cases if len(case[0]) in (1, 17, 100)]
    texts = [driver.start(slot, prompt) for slot, (prompt, _) in enumerate(cases)]
    assert driver.finish(texts, 4, chunk=48) == [expected[:4] for _, expected in cases]  # the interpreter is slow
    driver.executor.close()


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", MODELS)
def test_a_cached_prefix_gives_the_tokens_of_a_cold_start(models: Any, name: str, page_size: int, device: str) -> None:
    """The second request shares whole pages of the first and computes only the rest."""
    folder, prompts = models(name)
    prompt, expected = prompts[-2]
    driver = Driver(load(folder, device, page_size))
    first = driver.start(0, prompt)
    driver.finish([first], MAX_NEW)
    for slot, num_shared_pages in enumerate((1, (len(prompt) - 1) // page_size), start=1):
        second = driver.start(slot, prompt, shared=num_shared_pages * page_size)
        second.pages = first.pages[:num_shared_pages]
        assert driver.finish([second], MAX_NEW, chunk=64) == [expected]
    driver.executor.close()


@pytest.mark.parametrize("device", DEVICES)
def test_extends_and_decode_rows_share_steps(models: Any, device: str) -> None:
    """Short prompts decode while a long one is extended; a new request starts in every step."""
    folder, prompts = models("qwen3")
    driver = Driver(load(folder, device, page_size=16))
    texts = [driver.start(slot, prompt) for slot, (prompt, _) in enumerate(prompts)]
    for num_started in range(1, len(texts)):
        active = [text for text in texts[:num_started] if len(text.output) < MAX_NEW]
        driver.step(*((text, 48) for text in active))
    assert driver.finish(texts, MAX_NEW, chunk=48) == [expected for _, expected in prompts]
    driver.executor.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_retracted_request_continues_with_the_same_tokens(models: Any, device: str) -> None:
    """The request loses slot and pages after four tokens; one extend computes prompt and output in another slot."""
    folder, prompts = models("llama3")
    prompt, expected = prompts[5]
    driver = Driver(load(folder, device, page_size=16))
    text = driver.start(0, prompt)
    driver.finish([text], 4)
    again = driver.start(9, prompt)
    again.output = list(text.output)
    driver.step((again, 0))
    assert driver.finish([again], MAX_NEW) == [expected]
    driver.executor.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_decode_node_continues_from_transferred_pages_and_a_first_token(models: Any, device: str) -> None:
    """Pages are copied between executors with ``export_page`` and ``landed``, the token with ``Admit.last_token``."""
    from common.step_plan import Admit, PageDelta, Row, StepPlan

    folder, prompts = models("qwen3")
    prompt, expected = prompts[6]
    prefill, decode = load(folder, device, page_size=16), load(folder, device, page_size=16)
    driver = Driver(prefill)
    text = driver.start(0, prompt)
    driver.finish([text], 1)
    targets = list(range(5, 5 + len(text.pages)))
    size = decode.pool.layout.page_bytes
    with memoryview(decode.pool.memory) as memory:
        for source, target in zip(text.pages, targets, strict=True):
            with memory[target * size : (target + 1) * size] as place:
                prefill.pool.export_page(source, place)
    decode.pool.landed(targets)
    admit = Admit(2, text.params, len(prompt), text.output[0])
    output = list(text.output)
    for step in range(MAX_NEW - 1):
        first = step == 0
        result = decode.run(
            StepPlan(
                step,
                (admit,) if first else (),
                (PageDelta(2, 0, (*targets, 50)),) if first else (),
                (Row(2, len(prompt) + step, None, True),),
            )
        )
        output += result.tokens
    assert tuple(output) == expected
    prefill.close()
    decode.close()
