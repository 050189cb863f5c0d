"""The few files of a checkpoint that the gateway reads: tokenizer, chat template, configuration; never weights."""

from pathlib import Path

from common.errors import ConfigError

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")


def model_folder(model: str, revision: str | None = None) -> Path:
    """The folder itself, or where the hub's files were put. Raises ConfigError naming ``--model``."""
    if Path(model).is_dir():
        return Path(model)
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"--model {model}: there is no such folder")
    import huggingface_hub  # only for hub ids: it takes a while to load

    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # network, names, rights: the library has dozens of them
        raise ConfigError(f"--model {model}: its tokenizer cannot be fetched from the hub: {error}") from error
