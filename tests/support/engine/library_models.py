"""Tiny random models of the architectures that transformers computes for Baton, one for each line of docs/models.md."""

from pathlib import Path
from typing import Any

import torch
from support.engine.reference_models import TINY, draw_weights

#: Layers of both kinds where a model has windows, shorter than most prompts of the tests.
WINDOW = 24
_LAYERS = {"num_hidden_layers": 3, "sliding_window": WINDOW}
_ALTERNATING = {**_LAYERS, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

_LATENT = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
#: By the architecture's name in config.json: its ``model_type``, and what differs from ``TINY``.
LIBRARY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ApertusForCausalLM": ("apertus", {}),
    "ArceeForCausalLM": ("arcee", {}),
    "CohereForCausalLM": ("cohere", {"logit_scale": 1.5, "tie_word_embeddings": True}),
    "Cohere2ForCausalLM": ("cohere2", {**_ALTERNATING, "logit_scale": 1.5}),
    "DeepseekV3ForCausalLM": (
        "deepseek_v3",
        {
            **_EXPERTS,
            **_LATENT,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "Ernie4_5ForCausalLM": ("ernie4_5", {}),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "Exaone4ForCausalLM": ("exaone4", {**_ALTERNATING}),
    "FlexOlmoForCausalLM": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Gemma2ForCausalLM": ("gemma2", {**_ALTERNATING, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "Gemma3ForCausalLM": ("gemma3_text", {**_ALTERNATING}),
    "GemmaForCausalLM": ("gemma", {}),
    "Glm4ForCausalLM": ("glm4", {}),
    "Glm4MoeForCausalLM": ("glm4_moe", {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
    "GlmForCausalLM": ("glm", {}),
    "GPT2LMHeadModel": ("gpt2", {}),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", {}),
    "GPTNeoXForCausalLM": ("gpt_neox", {}),
    "GptOssForCausalLM": ("gpt_oss", {**_ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GraniteForCausalLM": (
        "granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "GraniteMoeForCausalLM": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense", {}),
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {**_LAYERS}),
    "MixtralForCausalLM": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "NemotronForCausalLM": ("nemotron", {}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "Olmo3ForCausalLM": ("olmo3", {**_ALTERNATING}),
    "OlmoForCausalLM": ("olmo", {}),
    "OlmoeForCausalLM": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Phi3ForCausalLM": ("phi3", {"sliding_window": WINDOW}),
    "PhiForCausalLM": ("phi", {}),
    "PhimoeForCausalLM": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2ForCausalLM": ("qwen2", {**_ALTERNATING, "use_sliding_window": True}),
    "Qwen2MoeForCausalLM": (
        "qwen2_moe",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {**_EXPERTS, "num_experts": 4}),
    "SeedOssForCausalLM": ("seed_oss", {}),
    "SmolLM3ForCausalLM": (
        "smollm3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True},
    ),
    "StableLmForCausalLM": ("stablelm", {"hidden_size": 64}),
    "Starcoder2ForCausalLM": ("starcoder2", {"sliding_window": WINDOW}),
}

_GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
#: Families beyond the table: as above, and why they are refused; empty where the comparison at start lets them pass.
OTHER_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "AfmoeForCausalLM": ("afmoe", {**_ALTERNATING, **_EXPERTS, "num_experts": 4, "num_dense_layers": 1}, ""),
    "AXK1ForCausalLM": ("axk1", {**_EXPERTS, **_GROUPS, **_LATENT}, ""),
    "BioGptForCausalLM": ("biogpt", {}, "does not support attention functions from outside"),
    "BitNetForCausalLM": ("bitnet", {}, ""),
    "Cohere2MoeForCausalLM": (
        "cohere2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        "",
    ),
    "CwmForCausalLM": ("cwm", {**_ALTERNATING, "bos_token_id": 0}, ""),
    "DeepseekV2ForCausalLM": ("deepseek_v2", {**_EXPERTS, **_GROUPS, **_LATENT, "first_k_dense_replace": 1}, ""),
    "DeepseekV32ForCausalLM": ("deepseek_v32", {**_EXPERTS, **_GROUPS, **_LATENT}, "its forward pass over pages fails"),
    "DiffLlamaForCausalLM": ("diffllama", {}, "of its 2 layers not each has keys and values of its own, once"),
    "DogeForCausalLM": ("doge", {}, "it computes masks of its own"),
    "Dots1ForCausalLM": (
        "dots1",
        {**_EXPERTS, **_GROUPS, "n_shared_experts": 1, "first_k_dense_replace": 1},
        "",
    ),
    "ExaoneMoeForCausalLM": (
        "exaone_moe",
        {**_ALTERNATING, **_EXPERTS, "num_experts": 4, "n_group": 1, "topk_group": 1},
        "",
    ),
    "FlintForCausalLM": ("flint", {**_EXPERTS, "num_experts": 4, "sliding_window": WINDOW}, ""),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", {**_EXPERTS, **_GROUPS, **_LATENT}, ""),
    "GraniteMoeSharedForCausalLM": ("granitemoeshared", {"num_local_experts": 4, "num_experts_per_tok": 2}, ""),
    "GraniteMoeSWAForCausalLM": (
        "granitemoe_swa",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        "",
    ),
    "GraniteSWAForCausalLM": ("granite_swa", {"sliding_window": WINDOW}, ""),
    "HeliumForCausalLM": ("helium", {"head_dim": 12}, ""),
    "HunYuanMoEV1ForCausalLM": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}, ""),
    "HyperCLOVAXForCausalLM": ("hyperclovax", {}, ""),
    "HYV3ForCausalLM": ("hy_v3", {**_EXPERTS, "num_experts": 4}, ""),
    "Jais2ForCausalLM": ("jais2", {}, ""),
    "JetMoeForCausalLM": (
        "jetmoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "its forward pass over pages fails",
    ),
    "Kolibri1ForCausalLM": ("kolibri1", {**_EXPERTS, "num_experts": 4, "sliding_window": WINDOW}, ""),
    "LagunaForCausalLM": ("laguna", {**_EXPERTS, "num_experts": 4, "sliding_window": WINDOW}, ""),
    "LongcatFlashForCausalLM": (
        "longcat_flash",
        {"n_routed_experts": 4, **_LATENT},
        "its forward pass over pages fails",
    ),
    "MellumForCausalLM": ("mellum", {**_EXPERTS, "num_experts": 4, "sliding_window": WINDOW}, ""),
    "MiMoV2FlashForCausalLM": (
        "mimo_v2_flash",
        {**_EXPERTS, **_GROUPS, "sliding_window": WINDOW},
        "its layers differ in heads",
    ),
    "MiniCPM3ForCausalLM": ("minicpm3", {**_LATENT}, ""),
    "MiniMaxM2ForCausalLM": ("minimax_m2", {**_EXPERTS, "num_local_experts": 4}, ""),
    "Ministral3ForCausalLM": ("ministral3", {}, ""),
    "MinistralForCausalLM": ("ministral", {**_ALTERNATING}, ""),
    "NanoChatForCausalLM": ("nanochat", {}, ""),
    "OPTForCausalLM": ("opt", {"word_embed_proj_dim": 48, "ffn_dim": 80}, "its reduced copy cannot be computed"),
    "PersimmonForCausalLM": ("persimmon", {}, ""),
    "SolarOpenForCausalLM": ("solar_open", {**_EXPERTS, **_GROUPS}, ""),
    "VaultGemmaForCausalLM": ("vaultgemma", {"sliding_window": WINDOW}, ""),
    "YoutuForCausalLM": ("youtu", {**_LATENT}, ""),
}

#: Architectures without a plan in the library to divide them among ranks.
WITHOUT_PLAN = (
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GptOssForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "StableLmForCausalLM",
)


def make_library_model(folder: str | Path, architecture: str, seed: int = 0, **overrides: Any) -> Path:
    """Save a random float32 model of an architecture into ``folder`` with transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, own, *_ = LIBRARY_MODELS.get(architecture) or OTHER_MODELS[architecture]
    kind = CONFIG_MAPPING[model_type]
    known = kind()
    given = {key: value for key, value in {**TINY, "tie_word_embeddings": False}.items() if hasattr(known, key)}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**{**given, **own, **overrides}))
    assert type(model).__name__ == architecture
    draw_weights(model)
    model.save_pretrained(folder)
    return Path(folder)
