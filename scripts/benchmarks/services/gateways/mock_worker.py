"""An SGLang worker without a model, in the process of the benchmark: as little work as HTTP allows."""

import asyncio
import json
from typing import Any, cast

from common.config.shared import SMALL_MODEL_NAME
from scripts.benchmarks.services.gateways.client import Advance, Connection

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n"
STREAM_HEAD = HEAD % b"text/event-stream; charset=utf-8" + b"Transfer-Encoding: chunked\r\n\r\n"


def _whole(body: dict[str, Any]) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    return HEAD % b"application/json" + b"Content-Length: %d\r\n\r\n" % len(data) + data


def _answer(kind: str, **choice: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13, "prompt_tokens_details": None}
    choices = [{"index": 0, **choice, "logprobs": None, "finish_reason": "length", "matched_stop": None}]
    head = {"id": 32 * "0", "object": kind, "created": 1_760_000_000, "model": SMALL_MODEL_NAME}
    return {**head, "choices": choices, "usage": usage, "metadata": {"weight_version": "default"}}


def _chunk(length: int) -> bytes:
    """One chunk of about ``length`` bytes, as a server-sent event in a chunk of HTTP."""
    delta = {"role": None, "content": "a", "reasoning_content": None, "tool_calls": None}
    event = {**_answer("chat.completion.chunk", delta=delta), "usage": None, "padding": ""}
    event["padding"] = "." * (length - len(json.dumps(event, separators=(",", ":"))) - 8)
    data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNK = _chunk(300)
WHOLE = _whole(_answer("text_completion", text="a"))
MODEL = {
    "id": SMALL_MODEL_NAME,
    "object": "model",
    "owned_by": "sglang",
    "root": SMALL_MODEL_NAME,
    "max_model_len": 32768,
}
INFO = {
    "model_path": SMALL_MODEL_NAME, "served_model_name": SMALL_MODEL_NAME, "tokenizer_path": SMALL_MODEL_NAME,
    "is_generation": True, "tp_size": 1, "dp_size": 1, "version": "0.5.23", "weight_version": "default",
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_total_num_tokens": 1 << 20,
}  # fmt: skip
#: Everything else that a router asks for gets ``INFO``.
GETS = {b"/health": _whole({}), b"/v1/models": _whole({"object": "list", "data": [MODEL]})}


class MockWorker:
    """Answers generating requests whole, or with streams whose chunks it sends when it is told to."""

    def __init__(self) -> None:
        self.is_streaming = False
        self._streams: asyncio.Queue[WorkerProtocol] = asyncio.Queue()

    async def start(self) -> str:
        """Listen on a free port; return the URL."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: WorkerProtocol(self, self._streams), "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.close()

    def stream(self, is_streaming: bool) -> None:
        self.is_streaming = is_streaming

    async def begun(self) -> Advance:
        stream = await self._streams.get()

        def advance(connection: Connection) -> None:
            stream.write(CHUNK)

        return advance


class WorkerProtocol(asyncio.Protocol):
    def __init__(self, worker: MockWorker, streams: "asyncio.Queue[WorkerProtocol]") -> None:
        self._worker = worker
        self._streams = streams
        self._parts = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        request = self._parts + data if self._parts else data
        head, separator, body = request.partition(b"\r\n\r\n")
        if not separator or not _is_body_complete(head.lower(), body):
            self._parts = request
            return
        self._parts = b""
        method, path = head.split(b" ", 2)[:2]
        if method == b"GET":
            self.write(GETS.get(path, _whole(INFO)))
        elif self._worker.is_streaming:
            self.write(STREAM_HEAD)
            self._streams.put_nowait(self)
        else:
            self.write(WHOLE)


def _is_body_complete(head: bytes, body: bytes) -> bool:
    _, name, rest = head.partition(b"\r\ncontent-length:")
    if name:
        return len(body) >= int(rest.partition(b"\r\n")[0])
    return b"\r\ntransfer-encoding:" not in head or body.endswith(b"0\r\n\r\n")
