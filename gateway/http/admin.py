"""The endpoints that generate nothing: what is served, how it is doing, tokens and text, aborts and caches."""

import dataclasses
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from common.clock import Clock
from common.config.gateway import GatewayConfig
from common.config.options import options_of
from common.errors import ErrorCode, RequestError
from gateway.http.app import json_response
from gateway.http.protocol import AbortRequest, Body, Codec, Detokenize, Reprioritized, Tokenize, refuse
from gateway.metrics.collectors import Metrics
from gateway.requests.priority import PriorityResolver
from gateway.workers.control_plane import Control
from gateway.workers.served_models import Model, Models

FLUSH_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 5.0
#: Under this name ``/v1/workers/NAME/decisions`` tells of the gateway itself.
OWN_DECISIONS = "gateway"
DECISIONS, MAX_DECISIONS = 100, 1_000


class Queries:
    """Handlers of these endpoints.

    Attributes:
        body, tenant: read a request's body, and on whose account it is; set once there is something that can.
    """

    def __init__(
        self,
        config: GatewayConfig,
        models: Models,
        control: Control,
        metrics: Metrics,
        clock: Clock,
        claims: PriorityResolver,
    ) -> None:
        self._config = config
        self._models = models
        self._control = control
        self._metrics = metrics
        self._clock = clock
        self._codec = Codec()
        self._started_at = clock.now()
        self._created = int(time.time())
        self._claims = claims
        self._page = (Path(__file__).parent / "page.html").read_bytes()
        self.body: Callable[[web.BaseRequest], Awaitable[bytes]]
        self.tenant: Callable[[web.BaseRequest], str]

    def routes(self) -> dict[str, dict[str, Callable[[web.BaseRequest], Any]]]:
        return {
            "/v1/models": {"GET": self._list_models},
            "/v1/models/*": {"GET": self._one_model},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/abort_request": {"POST": self._abort_request},
            "/v1/requests/*": {"POST": self._reprioritize},
            "/flush_cache": {"POST": self._flush_cache},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics_text},
            "/server_info": {"GET": self._server_info},
            "/v1/workers": {"GET": self._workers},
            "/v1/workers/*": {"GET": self._decisions},
            "/": {"GET": self._live_page},
        }

    async def _decoded(self, request: web.BaseRequest, kind: type[Body]) -> Body:
        return self._codec.decode(kind, await self.body(request))

    # ---- models and their tokens -------------------------------------------------------------------------------------

    async def _list_models(self, request: web.BaseRequest) -> web.Response:
        return json_response({"object": "list", "data": [self._described(model) for model in self._models]})

    async def _one_model(self, request: web.BaseRequest) -> web.Response:
        return json_response(self._described(self._models.get(below(request, "/v1/models/"))))

    def _described(self, model: Model) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": context_length(model),
        }

    async def _tokenize(self, request: web.BaseRequest) -> web.Response:
        body = await self._decoded(request, Tokenize)
        model = self._models.get(body.model)
        given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
        if len(given) != 1:
            raise refuse("give exactly one of prompt, text and messages", "prompt")
        if body.messages is not None:
            texts = [await model.asker.render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)]
        else:
            single = body.prompt if body.prompt is not None else body.text
            texts = single if isinstance(single, list) else [single or ""]
        special = body.add_special_tokens and body.messages is None
        ids = [await model.asker.tokenize(text, add_special_tokens=special, param=given[0]) for text in texts]
        is_batch = isinstance(getattr(body, given[0]), list) and body.messages is None
        counts = [len(tokens) for tokens in ids]
        return json_response(
            {
                "tokens": ids if is_batch else ids[0],
                "count": counts if is_batch else counts[0],
                "max_model_len": context_length(model),
            }
        )

    async def _detokenize(self, request: web.BaseRequest) -> web.Response:
        body = await self._decoded(request, Detokenize)
        model = self._models.get(body.model)
        tokens: list[Any] = body.tokens
        is_batch = bool(tokens) and isinstance(tokens[0], list)
        if len(set(map(type, tokens))) > 1:
            raise refuse("token ids and lists of token ids cannot be mixed", "tokens")
        skip = body.skip_special_tokens
        texts = await model.asker.detokenize(tokens if is_batch else [tokens], skip)
        answer = texts if is_batch else texts[0]
        return json_response({"text": answer, "prompt": answer})

    # ---- what is under way, and caches -------------------------------------------------------------------------------

    async def _abort_request(self, request: web.BaseRequest) -> web.Response:
        body = await self._decoded(request, AbortRequest)
        if body.abort_all == (body.rid is not None):
            raise refuse("give either rid or abort_all: true", "rid")
        count = self._control.requests.abort_matching(body.rid, self.tenant(request))
        return json_response({"aborted": count})

    async def _reprioritize(self, request: web.BaseRequest) -> web.Response:
        rid, _, what = below(request, "/v1/requests/").rpartition("/")
        if what != "priority":
            raise RequestError(ErrorCode.NOT_FOUND, "there is nothing at this path")
        body = await self._decoded(request, Reprioritized)
        change = self._claims.change(body.priority, body.priority_class)
        count = self._control.requests.reprioritize(rid, self.tenant(request), *change)
        if not count:
            raise RequestError(ErrorCode.NOT_FOUND, f"no request with the id {rid[:200]!r} is under way")
        return json_response({"changed": count})

    async def _flush_cache(self, request: web.BaseRequest) -> web.Response:
        answers = await self._control.flush(FLUSH_TIMEOUT_S)
        late = [node.name for node, num_pages in answers if num_pages is None]
        if late:
            message = f"no answer within {FLUSH_TIMEOUT_S:g} s from {', '.join(late)}; the other caches are empty"
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, message)
        nodes = [
            {"name": node.name, "model": node.register.model, "num_pages": num_pages} for node, num_pages in answers
        ]
        return json_response({"num_pages": sum(num_pages or 0 for _, num_pages in answers), "nodes": nodes})

    # ---- how it is doing ---------------------------------------------------------------------------------------------

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: web.BaseRequest) -> web.Response:
        if self._control.is_stopping:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the server is stopping")
        ready = {model.name: model.fleet.registry.is_ready for model in self._models}
        if not any(ready.values()):
            self._models.first.fleet.limits()  # says what is missing
        return json_response({"status": "ready", "models": ready})

    async def _metrics_text(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": self._metrics.content_type})

    async def _server_info(self, request: web.BaseRequest) -> web.Response:
        known = options_of(GatewayConfig)
        values = dataclasses.asdict(self._config)
        config = {key: value for key, value in values.items() if key not in known or not known[key].is_secret}
        first = self._models.first
        models = {
            model.name: {"is_ready": model.fleet.registry.is_ready, "limits": model.fleet.registry.limits()}
            for model in self._models
        }
        return json_response(
            {
                "version": own_version(),
                "model": first.name,
                "uptime_s": round(self._clock.now() - self._started_at, 3),
                "num_in_flight": self._control.requests.num_in_flight,
                "is_ready": any(model["is_ready"] for model in models.values()),
                "control_address": self._control.address,
                "limits": first.fleet.registry.limits(),
                "models": models,
                "config": config,
            }
        )

    async def _workers(self, request: web.BaseRequest) -> web.Response:
        return json_response(
            {
                "workers": [self._control.describe(node) for node in self._control.fleets.nodes()],
                "num_in_flight": self._control.requests.num_in_flight,
                "num_waiting": sum(len(model.fleet.backlog) for model in self._models),
                "model": self._models.first.name,
                "models": [model.name for model in self._models],
                "is_ready": any(model.fleet.registry.is_ready for model in self._models),
            }
        )

    async def _decisions(self, request: web.BaseRequest) -> web.Response:
        name, _, what = below(request, "/v1/workers/").rpartition("/")
        if what != "decisions":
            raise RequestError(ErrorCode.NOT_FOUND, "there is nothing at this path")
        limit = limit_of(request)
        if name == OWN_DECISIONS:
            own = self._control.requests.decisions.last(limit, self._clock.now())
            return json_response({"worker": name, "decisions": [decided._asdict() for decided in own]})
        nodes = [node for node in self._control.fleets.nodes() if name in (node.incarnation, node.name)]
        if not nodes:
            raise RequestError(ErrorCode.NOT_FOUND, f"no node has the name or the incarnation {name[:200]!r}")
        told = await self._control.decisions(nodes[0], limit, ANSWER_TIMEOUT_S)
        if told is None:
            message = f"the node {nodes[0].name} gave no answer within {ANSWER_TIMEOUT_S:g} s"
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, message)
        return json_response({"worker": nodes[0].name, "decisions": told})

    async def _live_page(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=self._page, content_type="text/html", charset="utf-8")


def below(request: web.BaseRequest, prefix: str) -> str:
    """What a path says after this prefix, its escapes resolved."""
    return unquote(request.raw_path.partition("?")[0].removeprefix(prefix))


def limit_of(request: web.BaseRequest) -> int:
    """``?limit=``. Raises RequestError: not a number, or too large."""
    text = request.query.get("limit", str(DECISIONS))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_DECISIONS:
        raise refuse(f"must be a whole number from 1 to {MAX_DECISIONS}", "limit")
    return int(text)


def context_length(model: Model) -> int | None:
    """Tokens of prompt and output together, as the nodes have it; None while there are none."""
    limits = model.fleet.registry.limits()
    return limits.context_length if limits else None


def own_version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:
        return "0+unknown"
