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
from gateway.requests.output_processor import Delta, OutputEvents, OutputStream

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


class ResponseFormatter(Protocol):
    """One way to write outputs down; see ``gateway.http.responses``."""

    def first(self, relays: Sequence[OutputStream]) -> bytes: ...
    def chunk(self, relay: OutputStream, delta: Delta) -> bytes: ...
    def last(self, relays: Sequence[OutputStream]) -> bytes: ...
    def answer(self, relays: Sequence[OutputStream]) -> Any: ...


async def whole(relays: list[OutputStream], events: OutputEvents, render: ResponseFormatter) -> web.Response:
    """Waits for all outputs; the first error is everybody's."""
    num_open = len(relays)
    while num_open:
        for relay in await events.changed():
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
    request: web.BaseRequest, relays: list[OutputStream], events: OutputEvents, render: ResponseFormatter
) -> web.StreamResponse:
    """Server-sent events. Nothing is sent before there is something, so that an early failure has its status."""
    changed = await events.changed()
    for relay in changed:
        if relay.error is not None:
            raise relay.error
    response = web.StreamResponse(headers=SSE_HEADERS)
    await response.prepare(request)
    try:
        async with asyncio.timeout(relays[0].request.timeout_s + STALL_S):
            try:
                await _write_events(response, relays, changed, events, render)
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
    events: OutputEvents,
    render: ResponseFormatter,
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
            changed = await events.changed()
