"""Fill a model's weights from safetensors files, straight into their final places, and accept nothing odd.

A name that is missing, unexpected or of another shape is an error that says which, since a model with a hole in it
answers with noise and no complaint.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.engine.checkpoint import StoredTensor, stored_tensors
from common.engine.kv_pool import TORCH_DTYPES
from common.engine.model import DecoderWeights, lay_out
from common.engine.model_config import ModelConfig
from common.errors import ConfigError

#: Written by some exporters, derived from the configuration and never read.
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".masked_bias")


def load_weights(config: ModelConfig, dtype: str, device: torch.device) -> DecoderWeights:
    """The checkpoint in ``config.folder``, converted to ``dtype`` (a resolved name), on ``device``.

    Raises:
        ConfigError: tensors missing, unexpected, misshapen or unreadable, named.
    """
    weights, places = lay_out(config, TORCH_DTYPES[dtype], device)
    stored = stored_tensors(config.folder)
    if config.is_tied:
        stored.pop("lm_head.weight", None)  # a copy of the embedding that some exporters add
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith(_IGNORED_ENDINGS)}
    _check(places, stored, config.folder)
    for file in dict.fromkeys(tensor.file for tensor in stored.values()):
        _copy(file, (name for name, tensor in stored.items() if tensor.file == file), places)
    return weights


def _check(places: dict[str, Tensor], stored: dict[str, StoredTensor], folder: Path) -> None:
    wrong = [
        f"{name} is {list(tensor.shape)}, should be {list(places[name].shape)}"
        for name, tensor in stored.items()
        if name in places and tensor.shape != tuple(places[name].shape)
    ]
    complaints = {
        "missing": [name for name in places if name not in stored],
        "unexpected": [name for name in stored if name not in places],
        "of the wrong shape": wrong,
    }
    found = [f"{_some(names)} {what}" for what, names in complaints.items() if names]
    if found:
        raise ConfigError(f"{folder}: the tensors do not fit config.json: {'; '.join(found)}")


def _some(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _copy(file: Path, names: Iterable[str], places: dict[str, Tensor]) -> None:
    try:
        with safe_open(file, framework="pt") as reader:
            for name in names:
                places[name].copy_(reader.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: not readable as safetensors ({error})") from error
