"""A mock model server with known latencies, for testing load generators.

It runs as its own process (``mock_openai.py --ttft 0.05 --itl 0.01``), prints its port, and streams ``max_tokens``
tokens on ``/v1/completions``, ``/v1/chat/completions`` and ``/generate``. It records when each request arrived and when
each of its tokens was written, on the machine's monotonic clock; SIGTERM writes the records to ``--truth`` as JSON
lines.

Faults: ``--capacity`` (further requests wait), ``--stall AT:FOR`` (no token is sent in that time), ``--drop N`` (every
N-th connection is cut in mid-stream), ``--refuse N`` (every N-th request gets a 500), ``--slam N`` (every N-th
connection is cut before any response), ``--sour N`` (every N-th stream has an error event), ``--hang N`` (every N-th
stream stops), ``--wrong-usage``, ``--bunch N`` (N tokens per event), ``--split`` (writes cut into small parts),
``--crlf``, ``--want NAME:VALUE`` (401 without that header). ``--tls FILE`` speaks TLS with the key and certificate in
a file. The file imports nothing of this repository.
"""

import argparse
import asyncio
import json
import os
import signal
import ssl
import time
from collections import deque
from typing import Any


class CapacityQueue:
    """Admits ``capacity`` requests at a time, in order."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        if self._free > 0:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Mock:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.truth: list[dict[str, Any]] = []
        self.queue = CapacityQueue(options.capacity)
        self.number = 0
        self.first_at = 0.0
        self.seen: set[tuple[int, ...]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        arrived_at = time.monotonic()
        line, *headers = head.split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in headers)}
        method, path, _ = line.split(" ")
        body = json.loads(await reader.readexactly(int(fields.get("content-length", 0))) or b"{}")
        if self.options.want and self.options.want not in head.lower().replace(": ", ":"):
            _whole(writer, 401, {"error": {"message": "invalid credentials"}})
            return True
        if method == "GET":
            self._get(path, writer)
            return True
        return await self._answer(path, body, fields, writer, arrived_at)

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            _whole(writer, 200, {"data": [{"id": "mock", "owned_by": "mock", "meta": {"n_vocab": 1000}}]})
        elif path == "/metrics":
            text = f'# HELP mock_requests_total x\nmock_requests_total {self.number}\nmock_running{{node="a"}} 1.5\n'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text.encode()))
        else:
            _whole(writer, 404, {"error": {"message": "no such page"}})

    async def _answer(
        self, path: str, body: dict[str, Any], headers: dict[str, str], writer: asyncio.StreamWriter, arrived_at: float
    ) -> bool:
        options = self.options
        self.number += 1
        number = self.number
        self.first_at = self.first_at or arrived_at
        truth: dict[str, Any] = {"number": number, "arrived_at": arrived_at, "stamps": [], "body": _short(body)}
        truth["authorization"] = headers.get("authorization", "")
        truth["tenant"] = headers.get("x-baton-tenant", "")
        self.truth.append(truth)
        if _is_nth(number, options.slam):
            truth["flaw"] = "slam"
            writer.transport.abort()
            return False
        if _is_nth(number, options.refuse):
            truth["flaw"] = "refuse"
            _whole(writer, 500, {"error": {"message": "internal error", "type": "server_error", "code": "internal"}})
            return True
        await self.queue.enter()
        try:
            await self._pause_until(time.monotonic() + options.ttft)
            return await self._stream(path, body, writer, truth)
        finally:
            self.queue.leave()

    async def _stream(
        self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter, truth: dict[str, Any]
    ) -> bool:
        options, number = self.options, truth["number"]
        asked = _asked(body)
        prompt = body.get("prompt", body.get("input_ids", []))
        cached = self._cached(prompt)
        if not body.get("stream"):
            await self._pause_until(time.monotonic() + options.itl * (asked - 1))
            truth["stamps"] = [time.monotonic()]
            choice = {"index": 0, "text": "x" * asked, "finish_reason": "length"}
            _whole(writer, 200, {"choices": [choice], "usage": _usage(prompt, asked, cached)})
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        flaw = next((name for name in ("drop", "sour", "hang") if _is_nth(number, getattr(options, name))), "")
        truth["flaw"] = flaw
        if "chat" in path:
            choice = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            self._event(writer, {"object": "chat.completion.chunk", "choices": [choice]})
        due_at = time.monotonic()
        for first in range(0, asked, options.bunch):
            if first:
                due_at += options.itl
                await self._pause_until(due_at)
            if flaw and first >= asked // 2:
                return await self._fail(flaw, writer)
            ids = list(range(first, min(first + options.bunch, asked)))
            truth["stamps"].append(time.monotonic())
            self._event(writer, self._token(path, body, ids, asked, prompt, cached))
            await writer.drain()
        if "generate" not in path:
            said = asked + (1 if options.wrong_usage else 0)
            kind = "chat.completion.chunk" if "chat" in path else "text_completion"
            self._event(writer, {"object": kind, "choices": [], "usage": _usage(prompt, said, cached)})
        self._chunk(writer, b"data: [DONE]\n\n")
        self._write(writer, b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _fail(self, flaw: str, writer: asyncio.StreamWriter) -> bool:
        if flaw == "sour":
            self._event(writer, {"error": {"message": "the node was lost", "code": "node_lost"}})
            self._chunk(writer, b"data: [DONE]\n\n")
            self._write(writer, b"0\r\n\r\n")
            return True
        if flaw == "hang":
            await asyncio.sleep(3600)
        await writer.drain()
        writer.transport.abort()
        return False

    def _token(
        self, path: str, body: dict[str, Any], ids: list[int], asked: int, prompt: Any, cached: int
    ) -> dict[str, Any]:
        text = "".join(f" t{number}" for number in ids)
        is_last = ids[-1] == asked - 1
        if "generate" in path:
            meta = {"id": "g", "prompt_tokens": len(prompt), "completion_tokens": ids[-1] + 1, "cached_tokens": cached}
            meta |= {"finish_reason": {"type": "length"}, "timings": {"prefill_s": 0.25}} if is_last else {}
            so_far = list(range(ids[-1] + 1))
            return {"text": "".join(f" t{number}" for number in so_far), "output_ids": so_far, "meta_info": meta}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_last else None}
        choice |= {"delta": {"content": text}} if "chat" in path else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        kind = "chat.completion.chunk" if "chat" in path else "text_completion"
        return {"id": "cmpl-1", "object": kind, "created": 1, "model": "mock", "choices": [choice]}

    def _cached(self, prompt: Any) -> int:
        """Tokens of the longest prefix seen before, in pages of 16; at least one token is not cached."""
        if not isinstance(prompt, list):
            return 0
        pages = [tuple(prompt[:end]) for end in range(16, len(prompt), 16)] if len(prompt) < 2000 else []
        found = max((len(page) for page in pages if page in self.seen), default=0)
        self.seen.update(pages)
        return found

    def _event(self, writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
        end = b"\r\n\r\n" if self.options.crlf else b"\n\n"
        self._chunk(writer, b"data: " + json.dumps(content).encode() + end)

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        self._write(writer, b"%x\r\n%b\r\n" % (len(data), data))

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if not self.options.split:
            writer.write(data)
            return
        for at in range(0, len(data), 7):
            writer.write(data[at : at + 7])

    async def _pause_until(self, at: float) -> None:
        """Sleep until an instant; none lies inside the stall."""
        if self.options.stall:
            begin, length = (float(part) for part in self.options.stall.split(":"))
            begin += self.first_at
            if begin <= at < begin + length:
                at = begin + length
        while (left := at - time.monotonic()) > 0:
            await asyncio.sleep(left - 0.0008 if left > 0.0015 else 0)


def _is_nth(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _asked(body: dict[str, Any]) -> int:
    sampling = body.get("sampling_params", {})
    return int(body.get("max_tokens") or body.get("max_completion_tokens") or sampling.get("max_new_tokens") or 4)


def _short(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:64] if isinstance(value, list) else value for name, value in body.items()}


def _usage(prompt: Any, completion: int, cached: int) -> dict[str, Any]:
    count = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
    return {
        "prompt_tokens": count,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _whole(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("ttft", "itl"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    for name in ("drop", "refuse", "slam", "sour", "hang"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--bunch", type=int, default=1)
    parser.add_argument("--stall", default="")
    parser.add_argument("--truth", default="")
    parser.add_argument("--want", default="")
    parser.add_argument("--tls", default="")
    for name in ("wrong-usage", "split", "crlf"):
        parser.add_argument(f"--{name}", action="store_true")
    mock = Mock(parser.parse_args())
    context = None
    if mock.options.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(mock.options.tls)
    server = await asyncio.start_server(mock.serve, "127.0.0.1", 0, backlog=1024, limit=1 << 24, ssl=context)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    print(server.sockets[0].getsockname()[1], flush=True)
    await stopped.wait()
    server.close()
    if mock.options.truth:
        with open(mock.options.truth, "w") as file:
            file.writelines(json.dumps(one) + "\n" for one in mock.truth)
    os._exit(0)  # without waiting for streams that hang


if __name__ == "__main__":
    asyncio.run(main())
