"""The served models: for each its tokenizer, chat template, output length predictor and nodes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.config.gateway import GatewayConfig
from common.scheduling.output_length_predictor import Predictor
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from gateway.workers.pool import WorkerPool, make_fleet


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One served model.

    Attributes:
        chat_template: None if the checkpoint has no chat template.
        predictor: learns the output lengths of requests to this model.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    predictor: Predictor
    fleet: WorkerPool


def load_models(config: GatewayConfig, folders: Mapping[str, Path]) -> dict[str, Model]:
    """The served models by name; the first is the default and takes ``--chat-template``.

    Args:
        folders: where the tokenizer files of each model are.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    models: dict[str, Model] = {}
    for name, folder in folders.items():
        tokenizer = Tokenizer.load(folder)
        file = config.chat_template if not models else None
        template = ChatTemplate.load(folder, None if file is None else Path(file))
        models[name] = Model(name, tokenizer, template, Predictor(), make_fleet(config, name, tokenizer.vocab_size))
    return models
