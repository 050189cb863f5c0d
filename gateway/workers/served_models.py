"""The models that are served here: for each its name, its tokenizer and chat template, and its nodes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.config.gateway import GatewayConfig
from common.errors import ErrorCode
from common.scheduling.output_length_predictor import OutputLengthPredictor
from gateway.http.protocol import refuse
from gateway.requests.input_processor import InputProcessor
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Text
from gateway.workers.pool import WorkerPool, make_fleet


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One model as clients see it."""

    name: str
    text: Text
    asker: InputProcessor
    fleet: WorkerPool
    predictor: OutputLengthPredictor


class Models:
    """All of them by name; the first serves requests that name none.

    Args:
        config: resolved configuration.
        folders: where the tokenizer's files of each model are, by the model's name.
    """

    def __init__(self, config: GatewayConfig, folders: Mapping[str, Path]) -> None:
        templates = [config.chat_template] + [None] * len(folders)
        self._by_name = {
            name: _load(config, name, folder, template)
            for (name, folder), template in zip(folders.items(), templates, strict=False)
        }
        self.first = next(iter(self._by_name.values()))

    def __iter__(self) -> Iterator[Model]:
        return iter(self._by_name.values())

    def get(self, name: str | None) -> Model:
        """The model of this name. Raises RequestError: there is none."""
        if name is None:
            return self.first
        model = self._by_name.get(name)
        if model is None:
            served = ", ".join(repr(known) for known in self._by_name)
            message = f"the model {name[:200]!r} is not served here, only {served}"
            raise refuse(message, "model", ErrorCode.MODEL_NOT_FOUND)
        return model

    def close(self) -> None:
        for model in self:
            model.asker.close()


def _load(config: GatewayConfig, name: str, folder: Path, template: str | None) -> Model:
    text = Text.load(folder)
    chat = ChatTemplate.load(folder, None if template is None else Path(template))
    predictor = OutputLengthPredictor()
    asker = InputProcessor(name, text, chat, request_timeout_s=config.request_timeout, predictor=predictor)
    return Model(name, text, asker, make_fleet(config, name, text.vocab_size), predictor)
