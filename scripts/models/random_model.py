"""Makes a checkpoint of Qwen3-0.6B's shape with random weights, for benchmarks.

Speed does not depend on the values of the weights, so nothing is downloaded. The tokenizer is that of the small model,
padded with words to the size of the vocabulary, so that every sampled token detokenizes to text. The checkpoint (1.2
GB) is kept in ``$XDG_CACHE_HOME/baton`` or ``~/.cache/baton``, and made again if ``RECIPE`` changes.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.config.shared import SMALL_MODEL
from common.errors import BatonError
from common.system.python_environ import python_environ
from scripts.serving.bound_process import bound_command
from scripts.temporary_folder import TemporaryFolder

#: config.json of Qwen/Qwen3-0.6B, with a shorter context, which bounds the memory of a node.
QWEN3_600M: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 4096,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
}
RECIPE = 2  # rises when what is written below changes
SEED = 0


def random_model(config: dict[str, Any] = QWEN3_600M) -> Path:
    """The folder of a checkpoint with this configuration, made atomically if it does not exist.

    Raises BatonError: the weights cannot be written.
    """
    text = json.dumps([RECIPE, SEED, config], sort_keys=True)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    folder = cache / f"random-{config['model_type']}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if (folder / "config.json").exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(TemporaryFolder("making-", cache)) as place:
        made = place.path / "model"
        made.mkdir()
        _write_weights_elsewhere(made, config)
        _write_tokenizer(made, config["vocab_size"])
        (made / "config.json").write_text(json.dumps(config, indent=1))
        if folder.exists():
            shutil.rmtree(folder)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # unless another process has just made it
                raise
    return folder


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Qwen3 checkpoint with tied embeddings, by name, with its shape."""
    hidden, middle, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    for number in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (hidden,)}


def _write_weights_elsewhere(folder: Path, config: dict[str, Any]) -> None:
    """Write the weights in a process of its own, which frees torch's memory, and ends at once with this one."""
    words = [sys.executable, "-m", "scripts.models.random_model", str(folder), json.dumps(config)]
    if status := subprocess.run(bound_command(words), env=python_environ(os.environ), check=False).returncode:
        raise BatonError(f"the random weights in {folder} cannot be written (status {status}); see above")


def _write_weights(folder: Path, config: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"  # a GPU draws 8 billion numbers in a second
    generator = torch.Generator(device).manual_seed(SEED)
    tensors = {}
    for name, shape in shapes(config).items():
        is_norm = len(shape) == 1
        tensor = torch.ones(shape) if is_norm else torch.randn(shape, generator=generator, device=device) * 0.02
        tensors[name] = tensor.to(getattr(torch, config["dtype"])).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the small model's tokenizer, padded with the words ``w1024``, ``w1025`` and so on."""
    tokenizer = json.loads(Path(SMALL_MODEL, "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    # Special tokens keep their ids only if the vocabulary contains them.
    vocab |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    first = len(vocab)
    vocab |= {f"\u0120w{number}": number for number in range(first, vocab_size)}  # U+0120 is a space in byte-level BPE
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(Path(SMALL_MODEL, name), folder / name)


if __name__ == "__main__":
    _write_weights(Path(sys.argv[1]), json.loads(sys.argv[2]))
