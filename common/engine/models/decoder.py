"""The decoder: embedding, layers of attention and gated feed-forward, norm, projection to the vocabulary.

One class serves every supported family; a part that a family lacks is None. ``allocate_weights`` allocates the weights,
with q, k, v merged into one matrix and gate and up into another; ``common.engine.models.checkpoints.weights`` fills
them. A tensor of an expert has Qwen's name here, whatever its name in the checkpoint.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.config.shared import WeightDtype
from common.engine.attention.cpu import CpuStep
from common.engine.attention.protocol import AttentionParams, LayerParams, RotatingAttention, StepAttention
from common.engine.cpu.huge_pages import HugePages
from common.engine.models.config import ModelConfig
from common.engine.models.expert_config import ExpertConfig
from common.engine.models.feed_forward import ExpertLoop, Experts, Mlp, make_expert_product
from common.engine.models.layer_weights import LayerWeights
from common.engine.models.layers import Operations, inverse_frequencies, make_operations, rotations
from common.engine.models.linear import Linear
from common.engine.models.lora.adapters import LoraWeights, StepAdapters, make_lora, native_adaptable
from common.engine.models.lora.checkpoint import Adaptable, AdapterCheckpoint
from common.engine.models.native_layers import native_layers
from common.engine.tensor_parallel.group import RankGroup
from common.engine.tensor_parallel.shard import WHOLE_MODEL, Shard


@dataclass(slots=True)
class DecoderWeights:
    """Weights of a model.

    Attributes:
        head: shares the embedding's storage if the model ties the two; None on ranks that do not sample.
    """

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Linear | None

    def pack(self, dtype: WeightDtype = "auto") -> None:
        """Round every matrix to ``dtype`` and repack it for this machine, one at a time, so that memory is enough.

        The projection to the vocabulary is the largest matrix of a small model, and is rounded too, to 8 bits at least:
        nothing evens out its errors. The embedding, of which a step reads a row for each token, stays as it is.
        """
        memory = HugePages()
        for layer in self.layers:
            for linear in (layer.qkv, layer.o):
                linear.pack(dtype, memory=memory)
            layer.mlp.pack(dtype, memory)
        if self.head is not None:
            at_least_int8: WeightDtype = "int8" if dtype == "int4" else dtype
            keep_weight = self.head.weight is self.embedding
            self.head.pack(at_least_int8, memory=memory, keep_weight=keep_weight, in_float32=True)


def allocate_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, has_head: bool = True
) -> tuple[DecoderWeights, dict[str, Tensor]]:
    """Return uninitialised weights, and for each tensor of a checkpoint, by name, the part of them that it fills.

    A part is a weight itself, or a view of some rows of one.
    """
    allocation = _Allocation(config, dtype, device)
    embedding = allocation.plain("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = [allocation.layer(index) for index in range(config.num_layers)]
    norm = allocation.plain("model.norm.weight", config.hidden_size)
    head = None
    if has_head:
        tied = config.is_tied
        head = Linear(embedding if tied else allocation.plain("lm_head.weight", config.vocab_size, config.hidden_size))
    return DecoderWeights(embedding, layers, norm, head), allocation.parts


class _Allocation:
    """Allocates the weights of one model, and notes in ``parts`` which tensor of a checkpoint fills which part."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self.parts: dict[str, Tensor] = {}

    def plain(self, name: str, *shape: int) -> Tensor:
        """A weight that one tensor fills."""
        self.parts[name] = tensor = self._empty(*shape)
        return tensor

    def layer(self, index: int) -> LayerWeights:
        config, base = self._config, f"model.layers.{index}."
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp, has_norm = base + "self_attn.", base + "mlp.", config.has_qk_norm
        hidden, experts = config.hidden_size, config.experts
        return LayerWeights(
            input_norm=self.plain(base + "input_layernorm.weight", hidden),
            qkv=self._merged(
                attention, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden, config.has_qkv_bias
            ),
            q_norm=self.plain(attention + "q_norm.weight", config.head_dim) if has_norm else None,
            k_norm=self.plain(attention + "k_norm.weight", config.head_dim) if has_norm else None,
            o=self._linear(attention + "o_proj", hidden, queries, config.has_o_bias),
            post_norm=self.plain(base + "post_attention_layernorm.weight", hidden),
            mlp=self._experts(mlp, experts) if experts and index in experts.layers else self._mlp(mlp),
        )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _linear(self, name: str, num_outputs: int, num_inputs: int, has_bias: bool) -> Linear:
        weight = self.plain(f"{name}.weight", num_outputs, num_inputs)
        return Linear(weight, self.plain(f"{name}.bias", num_outputs) if has_bias else None)

    def _merged(self, prefix: str, num_rows: dict[str, int], num_inputs: int, has_bias: bool) -> Linear:
        """One matrix whose rows several tensors fill, each as many as ``num_rows`` says."""
        sizes = list(num_rows.values())
        weight = self._empty(sum(sizes), num_inputs)
        bias = self._empty(sum(sizes)) if has_bias else None
        for kind, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                for name, rows in zip(num_rows, torch.split(tensor, sizes), strict=True):
                    self.parts[f"{prefix}{name}.{kind}"] = rows
        return Linear(weight, bias)

    def _mlp(self, base: str) -> Mlp:
        hidden, wide, has_bias = self._config.hidden_size, self._config.intermediate_size, self._config.has_mlp_bias
        gate_up = self._merged(base, {"gate_proj": wide, "up_proj": wide}, hidden, has_bias)
        return Mlp(gate_up, self._linear(base + "down_proj", hidden, wide, has_bias))

    def _experts(self, base: str, experts: ExpertConfig) -> Experts:
        number, hidden, wide = experts.num_experts, self._config.hidden_size, experts.width
        router = self._linear(base + "gate", number, hidden, has_bias=False)
        gate_up, down = self._empty(number, 2 * wide, hidden), self._empty(number, hidden, wide)
        for index in range(number):
            name = f"{base}experts.{index}."
            self.parts[name + "gate_proj.weight"], self.parts[name + "up_proj.weight"] = gate_up[index].chunk(2)
            self.parts[name + "down_proj.weight"] = down[index]
        return Experts(experts, router, make_expert_product(gate_up, down))


class Decoder:
    """A model, or one rank's part of it.

    Args:
        config: of the part.
        group: the ranks that compute the parts of every layer together; None: there is one part, the whole model.
        whole: the whole model, if ``config`` is of a part.
        shard: the part.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        group: RankGroup | None = None,
        *,
        whole: ModelConfig | None = None,
        shard: Shard = WHOLE_MODEL,
    ) -> None:
        device = weights.embedding.device
        self.config = config
        self._whole = whole or config
        self._shard = shard
        self.weights = weights
        self._group = group
        self._eps = config.rms_norm_eps
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._ops: Operations = make_operations(config, device)
        self._native = native_layers(self._ops, config, weights.layers) if group is None else None

    @property
    def attention_params(self) -> LayerParams:
        return (AttentionParams(),) * self.config.num_layers

    @property
    def adaptable(self) -> Adaptable:
        return native_adaptable(self._whole)

    def make_lora(self, adapter: AdapterCheckpoint) -> LoraWeights:
        embedding = self.weights.embedding
        products = [layer.mlp.product for layer in self.weights.layers if isinstance(layer.mlp, Experts)]
        has_expert_loop = all(isinstance(product, ExpertLoop) for product in products)
        return make_lora(
            adapter,
            self._whole,
            embedding.dtype,
            embedding.device,
            shard=self._shard,
            has_expert_loop=has_expert_loop,
        )

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        keep: Tensor | None = None,
        *,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """As ``CausalModel.hidden_states``; the result is that before the last norm.

        Args:
            tokens: on ranks other than 0, memory for the tokens of rank 0.
            keep: the last feed-forward layer skips all other tokens.
        """
        if self._group is not None:
            tokens = self._group.broadcast(tokens)
        x = F.embedding(tokens, self.weights.embedding)
        rotary = rotations(positions, self._frequencies, self.config.rope.attention_factor)
        if self._native is not None and adapters is None and isinstance(attention, CpuStep) and attention.is_native:
            return self._native.run(x, rotary, attention, keep)
        layers = self.weights.layers if adapters is None else adapters.layers(self.weights.layers)
        delta: Tensor | None = None
        for index, layer in enumerate(layers):
            qkv = layer.qkv(self._ops.add_rms_norm(x, delta, layer.input_norm, self._eps))
            attended = self._attend(index, qkv.view(len(x), -1, self.config.head_dim), rotary, attention).flatten(1)
            if keep is not None and index + 1 == len(self.weights.layers):
                x, attended = x[keep], attended[keep]
                if len(keep) == 0:
                    if self._group is not None:  # other ranks may still write KV of the last layer
                        self._group.barrier()
                    return x
            normed = self._ops.add_rms_norm(x, self._sum(layer.o(attended)), layer.post_norm, self._eps)
            delta = self._sum(layer.mlp(normed, self._ops))
        assert delta is not None
        return x + delta

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        assert self.weights.head is not None, "only rank 0 has the projection to the vocabulary"
        normed = self._ops.add_rms_norm(hidden, None, self.weights.norm, self._eps)
        return self.weights.head(normed, torch.float32, out)

    def _sum(self, x: Tensor) -> Tensor:
        """Return the sum of what all ranks have computed."""
        return x if self._group is None else self._group.all_reduce(x)

    def _attend(self, index: int, qkv: Tensor, rotary: tuple[Tensor, Tensor], attention: StepAttention) -> Tensor:
        """Normalise and rotate ``qkv`` ``[N, heads + 2 * kv_heads, head_dim]`` of a layer, and return its attention."""
        layer = self.weights.layers[index]
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        if isinstance(attention, RotatingAttention) and attention.can_rotate:
            return attention.rotate_and_extend(index, qkv, norms, rotary, self._eps)
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = self._ops.norm_and_rotate(qkv, heads, norms, rotary, self._eps)
        q, k, v = qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        return attention.extend(index, q, k, v)
