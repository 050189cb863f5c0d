"""The end token that a tokenizer names."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.errors import ConfigError
from common.model_folder import SPECIAL_TOKENS, TOKENIZER_CONFIG, TOKENIZER_FILE

P = TypeVar("P", bound=msgspec.Struct)


class _Token(msgspec.Struct):
    content: str
    id: int = -1


class _TokenizerConfig(msgspec.Struct):
    """The part of a ``tokenizer_config.json`` that is read, and of a ``special_tokens_map.json``."""

    eos_token: str | _Token | None = None
    added_tokens_decoder: dict[str, Any] | None = None


class _Tokenizer(msgspec.Struct):
    """The part of a ``tokenizer.json`` that is read: the rest, often 10 MB, is skipped."""

    added_tokens: list[_Token] = []


def tokenizer_end_ids(folder: Path) -> tuple[int, ...]:
    """Return the id of the tokenizer's ``eos_token``; none if the folder does not tell it.

    Fine-tunes of a base model often name the end of a turn there alone. vLLM and SGLang end outputs with it, too.

    Raises:
        ConfigError: a file cannot be read.
    """
    config = _part(folder / TOKENIZER_CONFIG, _TokenizerConfig)
    end = config.eos_token
    if config.added_tokens_decoder is None:  # of an older version of transformers, where the other file counts more
        end = _part(folder / SPECIAL_TOKENS, _TokenizerConfig).eos_token or end
    if end is None:
        return ()
    text = end if isinstance(end, str) else end.content
    return tuple(token.id for token in _part(folder / TOKENIZER_FILE, _Tokenizer).added_tokens if token.content == text)


def _part(file: Path, part: type[P]) -> P:
    """Return a part of a JSON file; its defaults if the file is missing."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=part)
    except FileNotFoundError:
        return part()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error})") from error
