"""transformers, in this process and on the very tensors that our engine packs."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common.engine.models.config import ModelConfig
from scripts.benchmarks.peers.peer import Workload


class TransformersPeer:
    name = "transformers"

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], workload: Workload) -> None:
        self._model = _build(config, tensors)
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


def _build(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    theirs = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=True,
    )
    theirs._attn_implementation = "sdpa"
    embedding = tensors["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = Qwen3ForCausalLM(theirs)
    model.load_state_dict({**tensors, "lm_head.weight": embedding}, assign=True, strict=True)
    # Buffers are not in the state dict: make the rotary ones again, outside the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs).to(embedding.device)
    return model.eval()
