"""The few files of a checkpoint that the gateway reads: tokenizer, chat template, configuration; never weights."""

import os
from pathlib import Path

from common.config.gateway import GatewayConfig, also_served
from common.errors import ConfigError

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")


def model_folders(config: GatewayConfig) -> dict[str, Path]:
    """Where the files of each served model are, by its name. Raises ConfigError naming the flag."""
    folders = {config.served_name: model_folder(config.model, config.revision)}
    for name, place in also_served(config).items():
        plain, _, revision = place.rpartition("@")
        is_revised = bool(plain) and not Path(os.path.expanduser(place)).is_dir()
        flag = f"--also-serve {name}="
        folders[name] = model_folder(*((plain, revision) if is_revised else (place, None)), flag=flag)
    return folders


def model_folder(model: str, revision: str | None = None, *, flag: str = "--model ") -> Path:
    """The folder itself, or where the hub's files were put. Raises ConfigError naming the flag."""
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        return folder
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"{flag}{model}: there is no such folder")
    import huggingface_hub  # only for hub ids: it takes a while to load

    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # network, names, rights: the library has dozens of them
        raise ConfigError(f"{flag}{model}: its tokenizer cannot be fetched from the hub: {error}") from error
