"""The application of a gateway with siblings: what one port says is true of all gateways behind it."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.routes.traces import REQUESTS
from gateway.http.routes.workers import DECISIONS
from gateway.siblings.combining import COMBINED, METRICS, combine_metrics, is_miss, is_owned
from gateway.siblings.forwarding import ClientRequest, Siblings, WholeAnswer


class CombiningApp:
    """Answers most requests by its own application, and some by those of all siblings too.

    Its own application comes first, so that it alone decides whether the client may ask.
    """

    def __init__(self, app: ASGIApp, siblings: Siblings) -> None:
        self._app = app
        self._siblings = siblings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _concerns_all(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        data = bytearray()

        async def remember() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                data.extend(message.get("body", b""))
            return message

        own = await _answer(self._app, scope, remember, send)
        await (await self._combined(own, ClientRequest(scope, bytes(data), send))).send(send)

    async def _combined(self, own: WholeAnswer, request: ClientRequest) -> WholeAnswer:
        path = request.scope["path"]
        if is_owned(path):
            if not is_miss(own.status, own.body):
                return own
            others = (await self._siblings.ask_all(request)).values()
            return next((answer for answer in others if not is_miss(answer.status, answer.body)), own)
        if own.status != 200:
            return own
        answers = {self._siblings.index: own}
        answers |= {i: other for i, other in (await self._siblings.ask_all(request)).items() if other.status == 200}
        return WholeAnswer(200, own.headers, _combine(request.scope, answers))


def _concerns_all(method: str, path: str) -> bool:
    return (method, path) in COMBINED or path == METRICS or is_owned(path)


def _combine(scope: Scope, answers: Mapping[int, WholeAnswer]) -> bytes:
    path = scope["path"]
    if path == METRICS:
        return combine_metrics({i: answer.body.decode() for i, answer in answers.items()}).encode()
    limits = parse_qs(scope["query_string"].decode("latin-1")).get("limit")
    default = REQUESTS if path == "/v1/requests" else DECISIONS
    limit = int(float(limits[-1])) if limits else default  # the application has taken it, which takes 5.0 too
    return COMBINED[scope["method"], path]([answer.body for answer in answers.values()], limit)


async def _answer(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> WholeAnswer:
    """The whole answer of an application. One to an unexpected error, which is raised for the log, is sent before."""
    head: dict[str, Any] = {}
    body = bytearray()

    async def keep(message: Message) -> None:
        if message["type"] == "http.response.start":
            head.update(message)
        else:
            body.extend(message.get("body", b""))

    def whole() -> WholeAnswer:
        headers = [(name.lower(), value) for name, value in head["headers"]]
        return WholeAnswer(head["status"], headers, bytes(body))

    try:
        await app(scope, receive, keep)
    except Exception:
        if head:
            await whole().send(send)
        raise
    return whole()
