"""Options of LoRA adapters, which a node adds to its model for the requests that name them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.config.options import check_unset, option
from common.errors import ConfigError

#: Names of adapters, which are names of models in the API. "@" separates name and digest in an adapter's id.
ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
NAME_RULE = "1 to 128 letters, digits, dots, dashes, slashes and underscores, of which the first is a letter or a digit"


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    lora: tuple[str, ...] = option(
        (),
        "LoRA adapter in PEFT's format that each node loads at start, and the model name under which it is served. May"
        " be given more than once.",
        metavar="NAME=DIR",
    )
    lora_dir: str | None = option(
        None,
        "Folder from which POST /v1/load_lora_adapter may load further LoRA adapters while nodes serve. Without it,"
        " such requests are refused.",
        metavar="DIR",
    )
    max_loaded_loras: int = option(8, "Maximum number of LoRA adapters on a node.", minimum=1, maximum=1024)
    max_lora_rank: int = option(
        64, "Maximum rank of a LoRA adapter; a node refuses adapters with a higher rank.", minimum=1, maximum=4096
    )


def adapter_id(name: str, digest: str) -> str:
    """Return what requests and caches know an adapter by: nodes agree on it if they agree on its content."""
    return f"{name}@{digest}"


def adapters_at_start(config: Any) -> Mapping[str, str]:
    """Return the folder of each adapter of ``--lora``, by name.

    Raises:
        ConfigError: a value is not NAME=DIR, or a name is wrong or given twice.
    """
    found: dict[str, str] = {}
    for given in config.lora:
        name, _, folder = given.partition("=")
        if not folder:
            raise ConfigError(f"--lora {given}: give NAME=DIR, the name of a model and the folder of its adapter")
        if not re.fullmatch(ADAPTER_NAME, name):
            raise ConfigError(f"--lora {given}: a name has {NAME_RULE}")
        if name in found:
            raise ConfigError(f"--lora {given}: the name {name} is given twice; leave one out")
        if name == config.served_name:
            raise ConfigError(f"--lora {given}: the model itself is served as {name}; give the adapter another name")
        found[name] = folder
    return found


def check_lora(config: Any) -> None:
    names = adapters_at_start(config)
    if len(names) > config.max_loaded_loras:
        raise ConfigError(
            f"--lora names {len(names)} adapters, and a node has at most {config.max_loaded_loras}: raise"
            " --max-loaded-loras"
        )
    if not names and config.lora_dir is None:
        why = "has no effect without --lora or --lora-dir; add one"
        check_unset(config, ("max_loaded_loras", "max_lora_rank"), why)
        return
    flag = "--lora" if names else "--lora-dir"
    if config.record:
        raise ConfigError(f"{flag} and --record exclude each other: a recording has no adapters; leave one out")


def cache_root(adapter: str, salt: str) -> str:
    """What separates the cached pages of an adapter, by its id, and a client's salt from those of all others.

    No id contains the zero character, so that different adapters and salts never give the same.
    """
    return f"\0{adapter}\0{salt}" if adapter or salt.startswith("\0") else salt
