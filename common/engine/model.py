"""The decoder: embed, a stack of attention and gated feed-forward layers, normalise, project to the vocabulary.

One model serves every known family; what a family lacks is a None in its weights. The weights' homes are laid out here
(q, k, v in one matrix, gate and up in another), under the names that checkpoints give their parts;
``weights`` fills them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.engine.attention.protocol import StepAttention
from common.engine.layers import Linear, Operations, inverse_frequencies, make_operations, rotations
from common.engine.model_config import ModelConfig


@dataclass(slots=True)
class LayerWeights:
    """One layer. ``qkv`` holds queries, keys, values in that order; ``gate_up`` gate before up."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class DecoderWeights:
    """All weights. ``head`` shares the embedding's storage when the model ties them."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Linear

    def pack(self) -> None:
        """Repack every matrix for this machine, one at a time, so that memory peaks at one matrix more than needed."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                linear.pack()
        self.head.pack(keep_weight=self.head.weight is self.embedding)


def lay_out(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[DecoderWeights, dict[str, Tensor]]:
    """Empty weights, and the part of them that each checkpoint tensor fills, by the checkpoint's name for it."""
    places: dict[str, Tensor] = {}

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def plain(name: str, *shape: int) -> Tensor:
        places[name] = tensor = empty(*shape)
        return tensor

    def merged(prefix: str, parts: dict[str, int], num_inputs: int, has_bias: bool) -> Linear:
        weight = empty(sum(parts.values()), num_inputs)
        bias = empty(sum(parts.values())) if has_bias else None
        sizes = list(parts.values())
        for name, rows in zip(parts, torch.split(weight, sizes), strict=True):
            places[f"{prefix}{name}.weight"] = rows
        for name, rows in zip(parts, torch.split(bias, sizes), strict=True) if bias is not None else ():
            places[f"{prefix}{name}.bias"] = rows
        return Linear(weight, bias)

    def layer(index: int) -> LayerWeights:
        base = f"model.layers.{index}."
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, has_norm = base + "self_attn.", config.has_qk_norm
        hidden, wide = config.hidden_size, config.intermediate_size
        return LayerWeights(
            input_norm=plain(base + "input_layernorm.weight", hidden),
            qkv=merged(attention, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden, config.has_qkv_bias),
            q_norm=plain(attention + "q_norm.weight", config.head_dim) if has_norm else None,
            k_norm=plain(attention + "k_norm.weight", config.head_dim) if has_norm else None,
            o=merged(attention, {"o_proj": hidden}, queries, config.has_o_bias),
            post_norm=plain(base + "post_attention_layernorm.weight", hidden),
            gate_up=merged(base + "mlp.", {"gate_proj": wide, "up_proj": wide}, hidden, config.has_mlp_bias),
            down=merged(base + "mlp.", {"down_proj": hidden}, wide, config.has_mlp_bias),
        )

    embedding = plain("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    weights = DecoderWeights(
        embedding=embedding,
        layers=[layer(index) for index in range(config.num_layers)],
        norm=plain("model.norm.weight", config.hidden_size),
        head=Linear(embedding if config.is_tied else plain("lm_head.weight", config.vocab_size, config.hidden_size)),
    )
    return weights, places


class Decoder:
    """A model ready to run: weights, and the arithmetic that joins them."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        device = weights.embedding.device
        self.config = config
        self.weights = weights
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._do: Operations = make_operations(config, device)

    def hidden_states(self, tokens: Tensor, positions: Tensor, attention: StepAttention, keep: Tensor) -> Tensor:
        """Extend by ``tokens`` ``[N]`` at ``positions`` ``[N]``, and give what is wanted of the outcome.

        Args:
            attention: writes the new KV into the pool and reads the old from it.
            keep: ``[K]`` int64, which of the N to give; the last layer stops short for the others.
        Returns:
            ``[K, hidden]``, before the last norm.
        """
        x = F.embedding(tokens, self.weights.embedding)
        turn = rotations(positions, self._frequencies, self.config.rope.attention_factor)
        delta: Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            q, k, v = self._qkv(layer, self._do.add_rms_norm(x, delta, layer.input_norm, self._eps), turn)
            attended = attention.extend(index, q, k, v).flatten(1)
            if index + 1 == len(self.weights.layers):
                x, attended = x[keep], attended[keep]
                if len(keep) == 0:
                    return x
            normed = self._do.add_rms_norm(x, layer.o(attended), layer.post_norm, self._eps)
            delta = layer.down(self._do.silu_and_multiply(layer.gate_up(normed)))
        assert delta is not None
        return x + delta

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` of the positions to sample, to float32 ``[rows, vocab]``."""
        return self.weights.head(self._do.add_rms_norm(hidden, None, self.weights.norm, self._eps)).float()

    @property
    def _eps(self) -> float:
        return self.config.rms_norm_eps

    def _qkv(self, layer: LayerWeights, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Queries ``[N, heads, head_dim]``, keys and values ``[N, kv_heads, head_dim]``, turned to their positions."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(x).view(len(x), -1, self.config.head_dim)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        qkv = self._do.norm_and_rotate(qkv, heads, norms, turn, self._eps)
        return tuple(torch.split(qkv, [heads, kv_heads, kv_heads], dim=1))
