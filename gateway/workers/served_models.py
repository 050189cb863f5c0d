"""The served models: their tokenizer files, chat templates, output length predictors and nodes."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from common.config.gateway import GatewayConfig, also_served
from common.errors import ErrorCode, RequestError
from common.model_folder import find_model, find_tokenizer, tokenizer_digest
from common.scheduling.output_length_predictor import OutputLengthPredictor
from gateway.requests.input.generate_request import GenerateRequest
from gateway.text.chat_template import ChatTemplate, special_tokens
from gateway.text.output_formats import TEXT_ONLY, ModelFormats
from gateway.text.reasoning_parsers import reasoning_format
from gateway.text.tokenizer import Tokenizer
from gateway.text.tool_parsers.registry import tool_format
from gateway.workers.pool import WorkerPool, make_pool

#: The files of a checkpoint that the gateway reads; never weights.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja", "generation_config.json", "config.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One served model.

    Attributes:
        chat_template: None if the checkpoint has no chat template.
        special_tokens: texts by name, such as ``eos_token``.
        formats: how it writes tool calls and reasoning.
        adapter: id of the LoRA adapter with which a request asked for it; empty: the model itself.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    special_tokens: Mapping[str, str]
    predictor: OutputLengthPredictor
    pool: WorkerPool
    formats: ModelFormats = TEXT_ONLY
    adapter: str = ""

    @property
    def asked_name(self) -> str:
        """The name by which a request asked for it, which answers repeat."""
        return self.adapter.rpartition("@")[0] or self.name

    @property
    def is_ready(self) -> bool:
        """Whether its nodes can serve a request."""
        return self.pool.registry.is_ready

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and output together; None while no requests are accepted."""
        limits = self.pool.registry.accepted
        return limits.context_length if limits else None


class ServedModels:
    """The served models in the order in which they were given.

    Attributes:
        default: the model of requests that name none; the first.
    """

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._by_name = models
        self.default = next(iter(models.values()))

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> ServedModel:
        return self._by_name[name]

    @property
    def is_ready(self) -> bool:
        """Whether a request for one of them can be served."""
        return any(model.is_ready for model in self)

    @property
    def by_readiness(self) -> list[ServedModel]:
        """Those that nodes can serve come first: what the others have may be on nodes that never come back."""
        return sorted(self, key=lambda model: not model.is_ready)

    def base(self, name: str | None) -> ServedModel:
        """The model of a ``base_model_name``, or the default. Raises RequestError: the gateway does not serve it."""
        model = self.default if name is None else self._by_name.get(name)
        if model is None:
            raise self._unknown(name or "", self._by_name, "base_model_name")
        return model

    def named(self, name: str | None) -> ServedModel:
        """The model with this name, which may be that of a LoRA adapter; without a name, the default.

        Raises:
            RequestError: there is none, as ``refusal`` says.
        """
        model = self.find(name)
        if model is None:
            raise self.refusal(name or "")
        return model

    def find(self, name: str | None) -> ServedModel | None:
        """The same; None if there is none."""
        if not name:  # editors send the name that their user has left empty
            return self.default
        model = self._by_name.get(name)
        if model is not None:
            return model
        for model in self.by_readiness:
            if name in model.pool.registry.adapters:
                return replace(model, adapter=model.pool.registry.adapters[name])
        return None

    def refusal(self, name: str) -> RequestError:
        """Why there is no model with this name: the gateway does not serve it, or no nodes that can serve a request
        together have the same adapter of this name, or no nodes have come that could have one."""
        for model in self:
            if error := model.pool.registry.refuse_adapter(name):
                return error
        if not (self.is_ready or any(model.pool.registry.is_withdrawn(name) for model in self)):
            return self.default.pool.no_route()
        adapters = [adapter for known in self for adapter in known.pool.registry.adapters]
        return self._unknown(name, [*self._by_name, *adapters], "model")

    def of(self, request: GenerateRequest) -> ServedModel:
        """The model that a request has, whose adapter may have been unloaded since it came."""
        model = self._by_name[request.model]
        return replace(model, adapter=request.adapter) if request.adapter else model

    @staticmethod
    def _unknown(name: str, served: Iterable[str], param: str) -> RequestError:
        known = ", ".join(map(repr, served))
        message = f"{param}: the model {name[:200]!r} does not exist here; the served models are {known}"
        return RequestError(ErrorCode.MODEL_NOT_FOUND, message, param=param)


def load_models(config: GatewayConfig, folders: Mapping[str, Path]) -> dict[str, ServedModel]:
    """The served models by name; the first is the default and takes ``--chat-template``.

    Raises ConfigError: a file is missing or cannot be read.
    """
    models: dict[str, ServedModel] = {}
    for name, folder in folders.items():
        tokenizer = Tokenizer.load(folder)
        file = config.chat_template if not models else None
        template = ChatTemplate.load(folder, None if file is None else Path(file))
        pool = make_pool(config, name, tokenizer.vocab_size, tokenizer_digest(folder))
        formats = _output_formats(config, template)
        models[name] = ServedModel(
            name, tokenizer, template, special_tokens(folder), OutputLengthPredictor(), pool, formats
        )
    return models


def _output_formats(config: GatewayConfig, template: ChatTemplate | None) -> ModelFormats:
    """The formats of ``--tool-call-parser`` and ``--reasoning-parser``. Raises ConfigError."""
    source = "" if template is None else template.source
    with_tools = source if template is None or template.with_tools is None else template.with_tools.source
    return ModelFormats(
        tools=tool_format(config.tool_call_parser, with_tools),
        reasoning=reasoning_format(config.reasoning_parser, source),
    )


def model_folders(config: GatewayConfig) -> dict[str, Path]:
    """The folder with the tokenizer files of each served model, by name. Raises ConfigError naming the flag."""
    if config.tokenizer:
        first = find_tokenizer(config.tokenizer, patterns=FILES)
    else:
        first = find_model(config.model, config.revision, patterns=FILES)
    folders = {config.served_name: first}
    for name, place in also_served(config).items():
        plain, _, revision = place.rpartition("@")
        is_revised = bool(plain) and not os.path.isdir(os.path.expanduser(place))
        found = (plain, revision) if is_revised else (place, None)
        folders[name] = find_model(*found, patterns=FILES, flag=f"--also-serve {name}=")
    return folders
