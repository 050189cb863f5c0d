"""Finds a checkpoint on disk and reads its JSON files and safetensors headers, but no tensors.

Only JSON and safetensors files are read: no remote code, no pickles.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError, UnsupportedModelError
from common.model_folder import find_checkpoint

FETCHED_FILES = ["*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
WEIGHT_FILES = ["*.safetensors"]
CODE_FILES = ["*.py"]
MAX_HEADER_BYTES = 100 << 20
MAX_INTEGER = 2**31 - 1  # in config.json
#: Far above what models have.
MAX_LAYERS = MAX_EXPERTS = 10_000


class StoredTensor(NamedTuple):
    file: Path
    dtype: str  # as safetensors writes it: F32, BF16, F16, ...
    shape: tuple[int, ...]
    num_bytes: int = 0


def locate(
    path_or_hub_id: str, revision: str | None = None, *, with_weights: bool = True, with_code: bool = False
) -> Path:
    """Return the checkpoint's folder; download the checkpoint if ``path_or_hub_id`` is not a local folder.

    Args:
        with_weights: download the weights.
        with_code: download Python files too.
    Raises:
        ConfigError: neither a folder nor a model of that name exists.
    """
    patterns = FETCHED_FILES + WEIGHT_FILES * with_weights + CODE_FILES * with_code
    return find_checkpoint(path_or_hub_id, revision, patterns=patterns)


def read_json(file: Path, *, required: bool = True) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing and not required.

    Raises:
        ConfigError: the file is missing, unreadable, not JSON, or not an object.
    """
    if not required and not file.exists():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: missing; --model must name the folder of a checkpoint") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the checkpoint, sorted by name.

    They are those that transformers reads: ``model.safetensors``, or else the files of the index. A folder that has
    neither is read whole.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        files = [whole]
    elif index.exists():
        weight_map = read_json(index).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(f"{index}: weight_map must map each tensor to the name of a file")
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ConfigError(f"{index}: weight_map has {outside[0]!r}, which is not in the folder of the checkpoint")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModelError(f"{folder}: no *.safetensors files; other formats, such as GGUF, are not read")
    return files


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the header entries of all tensors by name, sorted by name.

    Raises:
        ConfigError: the index or a header is damaged, or a file of the index is missing.
        UnsupportedModelError: there are no safetensors files at all.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        for name, tensor in _read_header(file).items():
            if name in found:
                raise ConfigError(f"{file}: tensor {name} is also in {found[name].file.name}")
            found[name] = tensor
    return dict(sorted(found.items()))


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Parse the header of a safetensors file: its length in eight bytes, then JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        return {
            name: StoredTensor(
                file, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0]
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: missing, although the index names it") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ConfigError(f"{file}: damaged safetensors header ({error})") from error


class Numbers:
    """Typed look-ups in config.json (or in an object inside it); errors name the key."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self._config = config
        self._folder = folder

    def positive(self, key: str, default: int | None = None, *, most: int = MAX_INTEGER) -> int:
        return int(self._number(key, default, (int,), "a positive integer", most))

    def real(self, key: str, default: float | None = None, *, most: float = sys.float_info.max) -> float:
        return float(self._number(key, default, (int, float), "a positive number", most))

    def _number(self, key: str, default: float | None, kinds: tuple[type, ...], what: str, most: float) -> Any:
        given = self._config.get(key)
        value: Any = default if given is None else given
        if type(value) not in kinds or not 0 < value <= most:
            limit = f" up to {most:.10g}" if type(value) in kinds and value > most else ""
            raise ConfigError(f"{self._folder}/config.json: {key} should be {what}{limit}, not {value!r}")
        return value
