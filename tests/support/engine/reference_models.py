"""Random tiny models, and the greedy float32 tokens that transformers generates with them.

A prompt for which the two highest logits of the reference come closer than ``CLOSE`` is replaced by another, so that
rounding cannot explain a failing test.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.sampling_params import SamplingParams

CLOSE = 1e-4
VOCAB_SIZE = 211

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
#: Families and overrides of the models that whole services are tested with.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3_yarn": ("qwen3", {"rope_parameters": YARN_ROPE}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"head_dim": None}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}


def make_model(folder: str | Path, family: str = "qwen3", seed: int = 0, **overrides: Any) -> Path:
    """Save a random float32 model of a family into ``folder`` with transformers."""
    import transformers

    names = {"qwen3_moe": "Qwen3Moe"}  # other classes are named as their families
    name = names.get(family, family.capitalize())
    if family == "mistral":
        overrides = {"sliding_window": None, **overrides}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**TINY, **overrides})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    draw_weights(model)
    model.save_pretrained(folder)
    return Path(folder)


def draw_weights(model: Any) -> None:
    """Draw the weights of a model again, with a variance at which greedy outputs do not repeat one token."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 1.5 * max(parameter.shape[-1], 1) ** -0.5)


def load_reference(folder: str | Path) -> Any:
    """Load the folder's model with transformers, in float32 and with eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def draw_prompts(
    model: Any, lengths: list[int], max_new: int, seed: int = 0, params: SamplingParams | None = None
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return one (prompt, greedy output of ``max_new`` tokens) per length.

    Args:
        model: result of ``load_reference``, or a folder.
        params: only biases and penalties have an effect.
    """
    if isinstance(model, str | Path):
        model = load_reference(model)
    random = np.random.default_rng(seed)
    return [_draw_prompt(model, length, max_new, random, params or SamplingParams()) for length in lengths]


def _draw_prompt(
    model: Any, length: int, max_new: int, random: np.random.Generator, params: SamplingParams
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    for _ in range(100):
        prompt = tuple(random.integers(0, model.config.vocab_size, length).tolist())
        expected = generate(model, prompt, max_new, **penalties(params, length))
        if expected is not None:
            return prompt, expected
    raise AssertionError(f"no prompt of {length} tokens whose top logits are clearly apart")


def generate(model: Any, prompt: tuple[int, ...], max_new: int, **options: Any) -> tuple[int, ...] | None:
    """Return greedy tokens by ``model.generate``; None if the two highest scores come closer than ``CLOSE``."""
    ids = torch.tensor([prompt], device=model.device)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new,
        min_new_tokens=max_new,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    for scores in made.scores:
        best = scores[0].topk(2).values
        if best[0] - best[1] < CLOSE:
            return None
    return tuple(made.sequences[0, len(prompt) :].tolist())


def penalties(params: SamplingParams, prompt_len: int) -> dict[str, Any]:
    """Return the options of ``model.generate`` for biases and penalties.

    transformers has no presence and frequency penalties, so OpenAI's formula is applied to the scores.
    """
    if not params.has_penalties and not params.logit_bias:
        return {}

    def by_occurrence(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, prompt_len:], minlength=scores.shape[1])
        return scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)

    return {
        "sequence_bias": {(token,): value for token, value in params.logit_bias} or None,
        "repetition_penalty": params.repetition_penalty,
        "logits_processor": [by_occurrence],  # applied last
    }


def prompt_logprobs(model: Any, prompt: tuple[int, ...]) -> torch.Tensor:
    """Return ``[len(prompt) - 1, vocab]``: row i holds the log-probability of every token at position i + 1."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt], device=model.device)).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1)
