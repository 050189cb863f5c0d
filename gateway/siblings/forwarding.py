"""Passes HTTP requests on to sibling gateways, and their answers back to the client.

Any gateway of a group may get a request that another one knows more about: the request repeats one, continues a stored
response, belongs to a tenant with a quota, or asks for something that the other one has. It is passed on as it came,
with the key of its client, so that the sibling checks and answers it as its own.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import ErrorCode, RequestError
from gateway.http.http_connection import REQUEST_ID
from gateway.http.json_response import JsonResponse
from gateway.http.request_cycle import RESPONSE_TIMEOUT, STALL_S
from gateway.siblings.connection import SiblingAnswer, SiblingLost, ask
from gateway.siblings.group import GatewayGroup

log = logging.getLogger(__name__)

#: Header of a passed-on request, and key of its ``scope["state"]``: a ``Passed``.
HEADER, PASSED = b"x-baton-passed", "passed"
#: A sibling that takes longer to say what it knows is left out. Beyond its deadline, a request gets this time there.
ANSWER_TIMEOUT_S = 5.0
#: A sibling that has not even read a request after this time hangs.
RECEIPT_S = 3.0
#: Headers about one connection, and those that every gateway writes itself.
OWN_REQUEST_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect", b"upgrade", b"te", b"trailer")
) | {HEADER, b"x-request-id"}
OWN_ANSWER_HEADERS = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"date", b"x-request-id"))


class Passed(StrEnum):
    """Why a request was passed on."""

    HOME = "home"  # the sibling is the one for such requests; what it does not know, others may
    QUESTION = "question"  # the sibling answers from what it has itself


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    async def send(self, send: Send) -> None:
        headers = [(name, value) for name, value in self.headers if name != b"content-length"]
        headers.append((b"content-length", b"%d" % len(self.body)))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


class ClientRequest(NamedTuple):
    """A request that this gateway has read, and the way to its client."""

    scope: Scope
    data: bytes
    send: Send
    deadline_ms: float | None = None


class Siblings:
    """The other gateways of a group.

    Args:
        request_timeout_s: deadline of requests without one of their own.
    """

    def __init__(self, group: GatewayGroup, *, request_timeout_s: float) -> None:
        self._group = group
        self._request_timeout_s = request_timeout_s

    @property
    def index(self) -> int:
        return self._group.index

    async def pass_home(self, kind: str, key: str, request: ClientRequest) -> bool:
        """Have the gateway answer that takes all requests of this kind and key; False if it is this one or is gone.

        A gateway that has just been started has no nodes yet, and knows no adapters: it counts as gone.
        """
        home = self._group.home(kind, key)
        if home == self._group.index or PASSED in request.scope["state"]:
            return False
        return await self._pass(home, request, Passed.HOME, unless=(ErrorCode.NO_ROUTE, ErrorCode.MODEL_NOT_FOUND))

    async def pass_to_holder(self, code: ErrorCode, request: ClientRequest) -> bool:
        """Ask one sibling after the other for an answer other than an error with this code; False without one."""
        if request.scope["state"].get(PASSED) == Passed.QUESTION:
            return False
        for index in self._group.others:
            if await self._pass(index, request, Passed.QUESTION, unless=(code,)):
                return True
        return False

    async def ask_all(self, request: ClientRequest) -> dict[int, WholeAnswer]:
        """The answers of all siblings by index; those that are gone or late are left out."""

        async def ask_one(index: int) -> WholeAnswer | None:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    answer = await self._ask(index, request, Passed.QUESTION)
            except TimeoutError:
                log.warning("the sibling gateway %d did not answer within %g s", index, ANSWER_TIMEOUT_S)
                return None
            return None if answer is None else await _whole(answer)

        answers = await asyncio.gather(*map(ask_one, self._group.others))
        found = zip(self._group.others, answers, strict=True)
        return {index: answer for index, answer in found if answer is not None}

    def _deadline_s(self, request: ClientRequest) -> float:
        return self._request_timeout_s if request.deadline_ms is None else request.deadline_ms / 1_000

    async def _pass(self, index: int, request: ClientRequest, passed: Passed, *, unless: Sequence[ErrorCode]) -> bool:
        """Have a sibling answer; False if it is gone, or its answer is an error with one of these codes."""
        answer = await self._ask(index, request, passed)
        if answer is None:
            return False
        if answer.status < 400:
            await self._relay(answer, request)
            return True
        whole = await _whole(answer)
        if whole is None or any(b'"%b"' % code.encode() in whole.body for code in unless):
            return False
        await whole.send(request.send)
        return True

    async def _ask(self, index: int, request: ClientRequest, passed: Passed) -> SiblingAnswer | None:
        """The answer of a sibling as soon as it begins; None if it is gone. Raises RequestError: it is too late."""
        limit_s = self._deadline_s(request) + ANSWER_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s):
                receipt_s = RECEIPT_S if request.data else None
                return await ask(self._group.address(index), _encoded(request, passed), receipt_s=receipt_s)
        except SiblingLost:
            return None
        except TimeoutError:
            message = f"a sibling gateway did not answer within {limit_s:g} s"
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, message) from None

    async def _relay(self, answer: SiblingAnswer, request: ClientRequest) -> None:
        """Send an answer to the client while it comes. If the sibling is lost, or hangs for longer than a client may
        take to read, the client's connection breaks."""
        limit_s = request.scope["state"][RESPONSE_TIMEOUT] = self._deadline_s(request) + STALL_S
        send = request.send
        try:
            async with asyncio.timeout(limit_s):
                await send({"type": "http.response.start", "status": answer.status, "headers": _kept(answer.headers)})
                async for part in answer.parts():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (SiblingLost, TimeoutError) as error:  # the server closes the connection of an unfinished answer
            why = str(error) or f"a sibling gateway has not ended it within {limit_s:g} s"
            log.warning("an answer ended early: %s", why)
        finally:
            answer.close()


class PassedOnApp:
    """What siblings reach: the application, which learns that a request was passed on.

    Only this reads the header, so that no client can claim it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            passed = next((value for name, value in scope["headers"] if name == HEADER), b"").decode("latin-1")
            if passed:
                try:
                    scope["state"][PASSED] = Passed(passed)
                except ValueError:
                    await JsonResponse({"error": "unknown reason for passing a request on"}, 400)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _encoded(request: ClientRequest, passed: Passed) -> bytes:
    """The request as it came, without the headers of the client's connection."""
    scope, data = request.scope, request.data
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    headers = [(name, value) for name, value in scope["headers"] if name not in OWN_REQUEST_HEADERS]
    headers += [
        (b"content-length", b"%d" % len(data)),
        (b"connection", b"close"),
        *([(b"expect", b"100-continue")] if data else []),
        (b"x-request-id", scope["state"][REQUEST_ID].encode()),
        (HEADER, passed.encode()),
    ]
    lines = [b"%b %b HTTP/1.1\r\n" % (scope["method"].encode(), target)]
    lines += [b"%b: %b\r\n" % header for header in headers]
    return b"".join([*lines, b"\r\n", data])


async def _whole(answer: SiblingAnswer) -> WholeAnswer | None:
    """An answer with its body; None if the sibling is lost, or hangs, before its end."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return WholeAnswer(answer.status, _kept(answer.headers), await answer.body())
    except (SiblingLost, TimeoutError) as error:
        why = str(error) or f"it took longer than {ANSWER_TIMEOUT_S:g} s"
        log.warning("a sibling gateway has not ended its answer: %s", why)
        return None
    finally:
        answer.close()


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name not in OWN_ANSWER_HEADERS]
