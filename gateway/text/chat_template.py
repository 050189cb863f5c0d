"""Renders chat messages to the text of a prompt, as ``apply_chat_template`` of ``transformers`` does.

Templates come with checkpoints and are untrusted code: they run in Jinja's immutable sandbox, over plain JSON. The
environment (whitespace control, ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, loop controls,
the ``generation`` tag) is the one that templates on the Hugging Face Hub expect.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, ErrorCode, RequestError

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", *TOKEN_NAMES})


class _Generation(Extension):
    """``{% generation %}`` marks training targets; here it renders its body and does nothing else."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """A compiled template with the special tokens that it may use.

    Args:
        special_tokens: by name, such as ``bos_token``, as text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template does not parse: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path, file: Path | None = None) -> "ChatTemplate | None":
        """Loads ``file``, or ``chat_template.jinja`` or ``tokenizer_config.json`` of a folder; None without a template.

        Raises ConfigError: it cannot be read, or does not parse.
        """
        config = _tokenizer_config(folder)
        if file is not None:
            try:
                return cls(file.read_text(encoding="utf-8"), _special_tokens(config))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--chat-template {file} cannot be read: {error}") from error
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        return cls(source, _special_tokens(config)) if isinstance(source, str) else None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt's text. Raises RequestError if the template refuses these messages."""
        values = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except SecurityError as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"chat template: {error}", param="messages") from error
        except Exception as error:  # untrusted code may raise anything
            message = f"messages: the model's chat template cannot render them: {error}"
            raise RequestError(ErrorCode.INVALID_REQUEST, message, param="messages") from error


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--model {folder}: tokenizer_config.json cannot be read: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is written as a string or as an object with ``content``."""
    tokens: dict[str, str] = {}
    for name in TOKEN_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens
