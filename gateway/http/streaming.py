"""Writes outputs to an HTTP answer: whole, or as server-sent events while the tokens arrive."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, ParamSpec

from starlette.types import Scope, Send

from common.errors import RequestError
from gateway.http.formatters.common import ResponseFormatter, as_error
from gateway.http.request_cycle import RESPONSE_TIMEOUT, STALL_S, RequestCycle, cycle_of
from gateway.requests.output_processor import Delta, OutputStream

log = logging.getLogger(__name__)

P = ParamSpec("P")

#: Answers and events with more log-probabilities than this, alternatives included, are formatted on a thread; each
#: takes about a microsecond.
MANY_LOGPROBS = 2_048
#: Answers with more are sent in parts, each of which is made once the client has read those before it.
MOST_LOGPROBS_AT_ONCE = 1 << 18
#: Events of one stream that are longer together are written in parts, between which the event loop has a turn.
MANY_BYTES = 128 << 10
#: A comment, which clients skip, so that no proxy takes a silent connection for a dead one.
PING = b": ping\n\n"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class DirectWriter(NamedTuple):
    """Where new text of a stream is written without waking its task, and in which form."""

    cycle: RequestCycle
    formatter: ResponseFormatter


class OutputEvents:
    """Collects the outputs of one HTTP request that have something new, for the task that answers it.

    An output is paused when more than ``max_unread`` of its tokens wait for the client to read, and goes on when at
    most half of that waits. An alternative at a token counts as much as a token.

    Args:
        set_paused: called with the rid of an output, and whether it is to be paused.
        ping_s: for how long nothing is written before ``changed`` returns without an output; 0: for ever.
    """

    def __init__(
        self,
        turn: "TurnEnd",
        set_paused: Callable[[str, bool], None],
        *,
        only_ends: bool,
        max_unread: int,
        ping_s: float = 0.0,
    ) -> None:
        self._turn = turn
        self._only_ends = only_ends
        self._max_unread = max_unread
        self._ping_s = ping_s
        self._written_at = asyncio.get_running_loop().time()
        self._timer: asyncio.TimerHandle | None = None
        self._set_paused = set_paused
        self._paused: list[OutputStream] = []
        self._changed: dict[int, OutputStream] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._writer: DirectWriter | None = None
        self._task = asyncio.current_task()

    def end(self) -> None:
        """End the answer and its connection, which is presumed dead since its client has asked again."""
        if self._task is not None:
            self._task.cancel()

    def wake(self, stream: OutputStream) -> None:
        if self._only_ends and not stream.is_ended:
            return
        is_first = not self._changed
        self._changed[stream.number] = stream
        waiter = self._waiter
        if waiter is None or waiter.done():
            if stream.num_untaken * _weight(stream) > self._max_unread and stream not in self._paused:
                self._paused.append(stream)
                self._set_paused(stream.request.rid, True)
        elif self._writer is None or stream.is_ended or len(stream.prompt_logprobs) * _weight(stream) > MANY_LOGPROBS:
            waiter.set_result(None)  # ends, errors and threads are the task's
        elif is_first:
            self._turn.add(self)

    @property
    def may_resume(self) -> bool:
        """Whether outputs are paused of which at most half of the bound is still to be written."""
        most = self._max_unread // 2
        return bool(self._paused) and all(stream.num_untaken * _weight(stream) <= most for stream in self._paused)

    def resume(self) -> None:
        """Let the paused outputs go on, once the client has read nearly all that was written."""
        paused, self._paused = self._paused, []
        for stream in paused:
            self._set_paused(stream.request.rid, False)

    async def changed(self, writer: DirectWriter | None = None) -> list[OutputStream]:
        """Wait until an output has something new; return all that have, each once. None of them: silence.

        Args:
            writer: writes new text meanwhile; this returns when an output has ended or the connection takes no more.
        """
        if not self._changed:
            loop = asyncio.get_running_loop()
            self._waiter, self._writer = loop.create_future(), writer
            if self._ping_s and self._timer is None:
                self._look_at_silence(loop)
            await self._waiter
            self._waiter = None
        changed, self._changed = list(self._changed.values()), {}
        return changed

    def _look_at_silence(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the task whenever nothing has been written for long enough, until ``close``."""
        now, silent_at = loop.time(), self._written_at + self._ping_s
        if silent_at <= now:
            silent_at = now + self._ping_s
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        self._timer = loop.call_at(silent_at, self._look_at_silence, loop)

    def close(self) -> None:
        """Nothing waits for outputs any more."""
        if self._timer is not None:
            self._timer.cancel()

    def on_written(self, at: float) -> None:
        """The stream has been written to, at this time of the event loop."""
        self._written_at = at

    def format(self) -> bytes:
        """What can be written directly now; wakes the task for the rest."""
        waiter, writer = self._waiter, self._writer
        if waiter is None or waiter.done() or writer is None:
            return b""
        if not writer.cycle.can_write_chunk:
            waiter.set_result(None)
            return b""
        events: list[bytes] = []
        num_bytes = 0
        try:
            for number, output in list(self._changed.items()):
                if num_bytes > MANY_BYTES:
                    break
                del self._changed[number]
                if (delta := output.take()) is not None:
                    events.append(writer.formatter.chunk(output, delta))
                    num_bytes += len(events[-1])
        except Exception as error:  # the task answers it
            waiter.set_exception(error)
            return b""
        if self._changed:
            waiter.set_result(None)
        return b"".join(events)

    def write(self, data: bytes, now: float) -> None:
        """Write what ``format`` has returned; an error ends this stream alone."""
        assert self._writer is not None and self._waiter is not None
        try:
            self._writer.cycle.write_chunk(data)
            self.on_written(now)
        except Exception as error:
            self._waiter.set_exception(error)


class TurnEnd:
    """Writes the events of all streams together, once the messages at hand are handled.

    So the messages of a turn make one event for each stream, no task wakes up for it, and the writes follow each other
    closely, which spares the system most of the wake-ups of a client on the same machine.
    """

    def __init__(self) -> None:
        self._due: list[OutputEvents] = []

    def add(self, events: OutputEvents) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._write_all)
        self._due.append(events)

    def _write_all(self) -> None:
        due, self._due = self._due, []
        formatted = [events.format() for events in due]
        now = asyncio.get_running_loop().time()
        for events, data in zip(due, formatted, strict=True):
            if data:
                events.write(data, now)


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]


async def send_whole(
    send: Send,
    outputs: list[OutputStream],
    events: OutputEvents,
    formatter: ResponseFormatter,
    *,
    headers: Mapping[str, str],
) -> None:
    """Wait for all outputs and send the answer. Raises RequestError: the first error of an output."""
    num_open = len(outputs)
    while num_open:
        for output in await events.changed():
            num_open -= 1
            if output.error is not None:
                raise output.error
    num_logprobs, parts = _num_logprobs_of(outputs), formatter.answer(outputs)
    if num_logprobs > MOST_LOGPROBS_AT_ONCE:
        await _send_in_parts(send, parts, formatter, headers)
        return
    body = await _made(num_logprobs, b"".join, parts)
    formatter.keep()
    cycle = cycle_of(send)
    if cycle is not None and cycle.can_write and not headers:
        cycle.write_json(body)
    else:
        lines = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *_encoded(headers)]
        await send({"type": "http.response.start", "status": 200, "headers": lines})
        await send({"type": "http.response.body", "body": body})


async def _send_in_parts(
    send: Send, parts: Iterator[bytes], formatter: ResponseFormatter, headers: Mapping[str, str]
) -> None:
    part = await asyncio.to_thread(next, parts, b"")
    formatter.keep()
    lines = [(b"content-type", b"application/json"), *_encoded(headers)]
    await send({"type": "http.response.start", "status": 200, "headers": lines})
    while part:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        part = await asyncio.to_thread(next, parts, b"")
    await send({"type": "http.response.body", "body": b""})


async def _made(num_logprobs: int, make: Callable[P, bytes], *args: P.args, **kwargs: P.kwargs) -> bytes:
    """Run ``make``; on a thread if there are more than ``MANY_LOGPROBS`` log-probabilities."""
    if num_logprobs <= MANY_LOGPROBS:
        return make(*args, **kwargs)
    return await asyncio.to_thread(make, *args, **kwargs)


async def send_stream(
    scope: Scope,
    send: Send,
    outputs: list[OutputStream],
    events: OutputEvents,
    formatter: ResponseFormatter,
    *,
    headers: Mapping[str, str],
) -> None:
    """Send server-sent events, and comments while there are none.

    The status is sent with the first of them, so that an early failure has its own.
    """
    changed = await events.changed()
    for output in changed:
        if output.error is not None:
            raise output.error
    scope["state"][RESPONSE_TIMEOUT] = outputs[0].request.timeout_s + STALL_S
    await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS + _encoded(headers)})
    try:
        last = await _send_events(send, outputs, changed, events, formatter)
    except Exception as error:  # the status has been sent already
        if not isinstance(error, RequestError):
            log.exception("a stream failed")
        last = formatter.error(as_error(error))
    await send({"type": "http.response.body", "body": last})


async def _send_events(
    send: Send,
    outputs: list[OutputStream],
    changed: list[OutputStream],
    events: OutputEvents,
    formatter: ResponseFormatter,
) -> bytes:
    """Send all events but the last, which it returns. Raises RequestError: an output has failed."""
    loop, cycle = asyncio.get_running_loop(), cycle_of(send)
    writer = None if cycle is None else DirectWriter(cycle, formatter)
    out: list[bytes] = []
    has_begun = False
    unended = {output.number for output in outputs}
    num_bytes = 0
    while True:
        error = None
        if not changed:
            out.append(PING)
        elif not has_begun:
            has_begun = True
            out.append(formatter.first(outputs))
        for output in changed:
            if output.number not in unended:  # it ended while this task waited, and its end has been written
                continue
            if num_bytes > MANY_BYTES:
                await send({"type": "http.response.body", "body": b"".join(out), "more_body": True})
                out.clear()
                num_bytes = 0
                await asyncio.sleep(0)
            if output.error is not None:
                error = output.error
                break
            delta = output.take()
            if delta is not None:
                out.append(await _made(_num_logprobs(output, delta), formatter.chunk, output, delta))
                num_bytes += len(out[-1])
                if delta.is_last:
                    unended.remove(output.number)
        if error is None and not unended:
            out.append(await _made(_num_logprobs_of(outputs), formatter.last, outputs))
            formatter.keep()
            return b"".join(out)
        if data := b"".join(out):
            await send({"type": "http.response.body", "body": data, "more_body": True})
            events.on_written(loop.time())
        if error is not None:
            raise error
        if events.may_resume:
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # returns once the client reads
            events.resume()
        out.clear()
        num_bytes = 0
        changed = await events.changed(writer if has_begun else None)


def _num_logprobs_of(outputs: list[OutputStream]) -> int:
    return sum([(len(output.prompt_logprobs) + len(output.logprobs)) * _weight(output) for output in outputs])


def _num_logprobs(output: OutputStream, delta: Delta) -> int:
    """Log-probabilities in an event, as far as they can be formatted while the output goes on."""
    num_tokens = len(delta.logprobs) if delta.is_last else 0
    if not delta.first:
        num_tokens += len(output.prompt_logprobs)
    return num_tokens * _weight(output)


def _weight(output: OutputStream) -> int:
    """A token and its alternatives, which an output with log-probabilities shows."""
    return 1 + (output.request.sampling.logprobs or 0)
