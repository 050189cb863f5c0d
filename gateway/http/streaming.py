"""From relays to an HTTP answer: all at once, or as server-sent events while the tokens come."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from aiohttp import web

from common.errors import RequestError
from gateway.http.app import json_response
from gateway.http.responses import as_error, error_body, event
from gateway.requests.output_processor import Delta, OutputStream

log = logging.getLogger(__name__)

#: Tokens with log-probabilities that are worth a thread: each takes some microseconds to be written down.
MANY_JUDGED = 2_048
#: A client that stops reading keeps its connection so long after its request's deadline.
STALL_S = 60.0
SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


Made = TypeVar("Made")


class Render(Protocol):
    """One way to write outputs down; see ``gateway.http.responses``."""

    def first(self, relays: Sequence[OutputStream]) -> bytes: ...
    def chunk(self, relay: OutputStream, delta: Delta) -> bytes: ...
    def last(self, relays: Sequence[OutputStream]) -> bytes: ...
    def answer(self, relays: Sequence[OutputStream]) -> Any: ...


class OutputEvents:
    """Where the outputs of one HTTP request report that they have something new."""

    def __init__(self, *, only_ends: bool) -> None:
        self._only_ends = only_ends
        self._changed: dict[int, OutputStream] = {}
        self._waiter: asyncio.Future[None] | None = None

    def wake(self, relay: OutputStream) -> None:
        if self._only_ends and not relay.is_ended:
            return
        self._changed[relay.number] = relay
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def changed(self) -> list[OutputStream]:
        """Waits for news; returns the outputs that have some, each once."""
        if not self._changed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        changed, self._changed = list(self._changed.values()), {}
        return changed


async def whole(relays: list[OutputStream], outlet: OutputEvents, render: Render) -> web.Response:
    """Waits for all outputs; the first error is everybody's."""
    num_open = len(relays)
    while num_open:
        for relay in await outlet.changed():
            num_open -= 1
            if relay.error is not None:
                raise relay.error
    num_judged = sum(len(relay.prompt_logprobs) + len(relay.logprobs) for relay in relays)
    return await _made(num_judged, lambda: json_response(render.answer(relays)))


async def _made(num_judged: int, make: Callable[[], Made]) -> Made:
    """What so many tokens with log-probabilities are written down in; on a thread if they are many."""
    if num_judged <= MANY_JUDGED:
        return make()
    return await asyncio.get_running_loop().run_in_executor(None, make)


async def stream(
    request: web.BaseRequest, relays: list[OutputStream], outlet: OutputEvents, render: Render
) -> web.StreamResponse:
    """Server-sent events. Nothing is sent before there is something, so that an early failure has its status."""
    changed = await outlet.changed()
    for relay in changed:
        if relay.error is not None:
            raise relay.error
    response = web.StreamResponse(headers=SSE_HEADERS)
    await response.prepare(request)
    try:
        async with asyncio.timeout(relays[0].ask.timeout_s + STALL_S):
            try:
                await _write_events(response, relays, changed, outlet, render)
            except ConnectionError:
                raise
            except Exception as error:  # the status has gone out already
                if not isinstance(error, RequestError):
                    log.exception("a stream failed")
                await response.write(event(error_body(as_error(error))))
            await response.write_eof()
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client has stopped reading") from error
    return response


async def _write_events(
    response: web.StreamResponse,
    relays: list[OutputStream],
    changed: list[OutputStream],
    outlet: OutputEvents,
    render: Render,
) -> None:
    out = [render.first(relays)]
    num_open = len(relays)
    while num_open:
        for relay in changed:
            if relay.error is not None:
                if data := b"".join(out):
                    await response.write(data)
                raise relay.error
            delta = relay.take()
            if delta is not None:
                num_judged = len(relay.prompt_logprobs) + len(relay.logprobs) if delta.is_last else 0  # else it goes on
                out.append(await _made(num_judged, partial(render.chunk, relay, delta)))
                num_open -= delta.is_last
        if not num_open:
            out.append(render.last(relays))
        if data := b"".join(out):
            await response.write(data)
        out.clear()
        if num_open:
            changed = await outlet.changed()
