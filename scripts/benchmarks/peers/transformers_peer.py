"""transformers, in this process and on the very tensors that our engine packs."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common.engine.models.config import ModelConfig
from common.engine.models.expert_config import ExpertConfig
from scripts.benchmarks.peers.peer import Workload


class TransformersPeer:
    name = "transformers"

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], workload: Workload) -> None:
        self._model = build_model(config, tensors)
        self._workload = workload
        self._device = tensors["model.embed_tokens.weight"].device
        self._dtype = tensors["model.embed_tokens.weight"].dtype

    @torch.inference_mode()
    def prefill_s(self, num_tokens: int) -> float:
        prompt = torch.randint(0, self._model.config.vocab_size, (1, num_tokens), device=self._device)
        started_at = time.perf_counter()
        self._model(input_ids=prompt, logits_to_keep=1).logits.argmax().item()
        return time.perf_counter() - started_at

    @torch.inference_mode()
    def decode_s(self, batch: int) -> float:
        """Decode as ``generate`` does, from a cache with random KV."""
        from transformers import DynamicCache

        config = self._model.config
        cache = DynamicCache(config=config)
        shape = (batch, config.num_key_value_heads, self._workload.context, config.head_dim)
        for layer in range(config.num_hidden_layers):
            kv = torch.randn(shape, device=self._device).to(self._dtype)
            cache.update(kv, kv, layer)
        tokens = torch.ones(batch, 1, dtype=torch.int64, device=self._device)
        started_at = time.perf_counter()
        for _ in range(self._workload.num_steps):
            logits = self._model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1:].argmax(dim=-1)
            tokens.tolist()
        return time.perf_counter() - started_at

    def close(self) -> None:
        self._model = None


def build_model(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Any:
    """Return the model in transformers, over the tensors of a checkpoint."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    values = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
    }
    embedding = tensors["model.embed_tokens.weight"]
    with torch.device("meta"):
        if config.experts is None:
            model: Any = Qwen3ForCausalLM(Qwen3Config(**values))
        else:
            values |= {
                "num_experts": config.experts.num_experts,
                "num_experts_per_tok": config.experts.num_per_token,
                "moe_intermediate_size": config.experts.width,
                "norm_topk_prob": config.experts.is_normalised,
            }
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values))
            tensors = _with_stacked_experts(tensors, config.experts)
    model.load_state_dict({**tensors, "lm_head.weight": embedding}, assign=True, strict=True)
    # Buffers are not in the state dict: make the rotary ones again, outside the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(embedding.device)
    return model.eval()


def _with_stacked_experts(tensors: Mapping[str, Tensor], experts: ExpertConfig) -> dict[str, Tensor]:
    """Return the tensors with one for all experts of a layer, as transformers 5 keeps them; this copies them."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in experts.layers:
        base = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            [tensors[f"{base}{index}.{matrix}.weight"] for index in range(experts.num_experts)]
            for matrix in ("gate_proj", "up_proj", "down_proj")
        )
        found[base + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        found[base + "down_proj"] = torch.stack(down)
    return found
