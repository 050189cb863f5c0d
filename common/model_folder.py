"""The folder of a model: a local one, or the one to which files of a hub id are downloaded.

``huggingface_hub`` downloads a hub model once and finds it in its cache later, with or without a network.
"""

import hashlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, FetchError

log = logging.getLogger(__name__)

#: The weights a second time, with other names of tensors, in repositories of Mistral AI and OpenAI.
OTHER_WEIGHTS = ("consolidated*", "original/*")
TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
#: Statuses with which the hub says that a model or revision does not exist, or is not for this user.
REFUSALS = (401, 403, 404)


def find_model(
    path_or_hub_id: str, revision: str | None = None, *, patterns: Sequence[str], flag: str = "--model "
) -> Path:
    """Return the folder of a model, without looking into a local one.

    Args:
        patterns: names of the files to download of a hub id.
        flag: the beginning of the option that names the model, for errors.
    Raises:
        ConfigError: there is no such folder, or the hub refuses the hub id.
        FetchError: the hub cannot be reached, or a download fails.
    """
    if not path_or_hub_id:
        raise ConfigError(f"{flag}is empty: no such folder; give a folder or a hub id")
    path = Path(os.path.expanduser(path_or_hub_id))
    if os.path.isdir(path):  # False in a folder that may not be searched, where the method raises
        return path
    if os.path.exists(path):
        what = "GGUF files are not read" if path.suffix == ".gguf" else "not a folder"
        raise ConfigError(f"{flag}{path_or_hub_id}: {what}; give the folder that holds config.json")
    if path_or_hub_id.startswith((".", "/", "~")) or path_or_hub_id.count("/") > 1:
        raise ConfigError(f"{flag}{path_or_hub_id}: no such folder")
    return _fetch(path_or_hub_id, revision, patterns, flag)


def find_checkpoint(
    path_or_hub_id: str, revision: str | None = None, *, patterns: Sequence[str] = ("config.json",)
) -> Path:
    """Like ``find_model``, and the folder must have a config.json."""
    folder = find_model(path_or_hub_id, revision, patterns=patterns)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model {path_or_hub_id}: there is no config.json in {folder}; give the folder of a checkpoint in the "
            "Hugging Face layout"
        )
    return folder


def find_tokenizer(
    path_or_hub_id: str, *, patterns: Sequence[str] = (TOKENIZER_FILE, TOKENIZER_CONFIG, SPECIAL_TOKENS)
) -> Path:
    """Return the folder of ``--tokenizer``. Raises ConfigError as ``find_model`` does, or without a tokenizer.json."""
    folder = find_model(path_or_hub_id, patterns=patterns, flag="--tokenizer ")
    if not (folder / TOKENIZER_FILE).is_file():
        raise ConfigError(f"--tokenizer {path_or_hub_id}: there is no {TOKENIZER_FILE} in {folder}")
    return folder


def tokenizer_digest(folder: Path) -> str:
    """Return the sha256 of the tokenizer file of a checkpoint; empty if it has none."""
    file = folder / TOKENIZER_FILE
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _fetch(hub_id: str, revision: str | None, patterns: Sequence[str], flag: str) -> Path:
    if not sys.stderr or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they are no log lines
    import huggingface_hub  # only for hub ids: it takes a while to load
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HFValidationError

    log.info("fetching %s from the hub or its local cache", hub_id)
    try:
        found = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(OTHER_WEIGHTS)
        )
        return Path(found)
    except Exception as error:  # of the hub, of the HTTP library that it has, or of the disk
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        is_refused = HF_HUB_OFFLINE or isinstance(error, HFValidationError) or _status(error) in REFUSALS
        raise (ConfigError if is_refused else FetchError)(
            f"{flag}{hub_id}: neither a local folder nor available from the hub or its local cache ({reason})"
        ) from error


def _status(error: BaseException | None) -> int | None:
    """The status of the answer that an error, or a cause of it, is about."""
    while error is not None:
        status: int | None = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status
        error = error.__cause__
    return None
