"""``write_gguf.py FILE LAYERS SHAPE``: writes a GGUF file of this shape with random weights in bfloat16.

SHAPE is that of ``bench engine``: qwen3-0.6b, or qwen3-moe-small with experts.

Runs by path with llama.cpp's package ``gguf``, without this repository. The file has no tokenizer.
"""

import sys

import gguf
import numpy as np
from numpy.typing import NDArray

HIDDEN, WIDE, HEADS, KV_HEADS, DIM, VOCAB = 1024, 3072, 16, 8, 128, 151_936
NUM_EXPERTS, EXPERTS_PER_TOKEN, EXPERT_WIDE = 64, 8, 768


def main() -> None:
    path, num_layers, has_experts = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "qwen3-moe-small"
    writer = gguf.GGUFWriter(path, "qwen3moe" if has_experts else "qwen3")
    if has_experts:
        writer.add_expert_count(NUM_EXPERTS)
        writer.add_expert_used_count(EXPERTS_PER_TOKEN)
        writer.add_expert_feed_forward_length(EXPERT_WIDE)
    writer.add_block_count(num_layers)
    writer.add_context_length(40_960)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, shape in shapes(num_layers, has_experts=has_experts).items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        elif "ffn_gate_inp" in name:  # llama.cpp keeps routers in float32
            writer.add_tensor(name, np.random.default_rng(0).normal(0, 0.02, shape).astype(np.float32))
        else:
            writer.add_tensor(name, random_bfloat16(shape), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shapes(num_layers: int, *, has_experts: bool) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (HIDDEN,), "attn_q": (HEADS * DIM, HIDDEN), "attn_k": (KV_HEADS * DIM, HIDDEN),
        "attn_v": (KV_HEADS * DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * DIM), "attn_q_norm": (DIM,),
        "attn_k_norm": (DIM,), "ffn_norm": (HIDDEN,),
    }  # fmt: skip
    if has_experts:
        layer["ffn_gate_inp"] = (NUM_EXPERTS, HIDDEN)
        layer["ffn_gate_exps"] = layer["ffn_up_exps"] = (NUM_EXPERTS, EXPERT_WIDE, HIDDEN)
        layer["ffn_down_exps"] = (NUM_EXPERTS, HIDDEN, EXPERT_WIDE)
    else:
        layer["ffn_gate"] = layer["ffn_up"] = (WIDE, HIDDEN)
        layer["ffn_down"] = (HIDDEN, WIDE)
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return found | {
        f"blk.{number}.{name}.weight": shape for number in range(num_layers) for name, shape in layer.items()
    }


def random_bfloat16(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return numbers of either sign between 0.004 and 0.06, as bytes: speed does not depend on their distribution."""
    random = np.random.default_rng(0)
    bits: NDArray[np.uint16] = random.integers(0x3B80, 0x3D70, shape, np.uint16)
    bits |= random.integers(0, 2, shape, np.uint16) << 15
    return bits.view(np.uint8)


if __name__ == "__main__":
    main()
