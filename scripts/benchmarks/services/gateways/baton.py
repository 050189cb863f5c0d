"""Baton in the gateway benchmark: a gateway process, and nodes without an engine behind it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import zmq

from common.config.shared import SMALL_MODEL, SMALL_MODEL_NAME, Role
from common.stage_spans import StageSpan
from common.wire.curve import CurveKeys
from common.wire.key_folder import load_keys
from common.wire.mailbox import Mailbox
from common.wire.messages import (
    FromGateway,
    Generate,
    Heartbeat,
    LayoutMessage,
    Message,
    Register,
    Registered,
    Spans,
    Tokens,
)
from common.wire.process_id import new_incarnation
from gateway.text.tokenizer import Tokenizer
from scripts.benchmarks.services.gateways.client import Advance, Connection, Gateway
from scripts.benchmarks.services.gateways.processes import pinned_process

#: What a prefill node reports with the first token, and a decode node with the second.
PREFILL_SPANS = (
    StageSpan("prefill_queue", 1.0, 0.001),
    StageSpan("prefill", 1.001, 0.02, 16),
    StageSpan("prefill_chunk", 1.001, 0.02, 16),
)
DECODE_SPANS = (
    StageSpan("decode_queue", 1.0, 0.001),
    StageSpan("prefill_wait", 1.001, 0.02),
    StageSpan("transfer", 1.021, 0.001, 1),
    StageSpan("batch_join", 1.022, 0.01),
)
#: How long the nodes may be silent. A node that was lost would not register again.
NODE_TIMEOUT_S = 60.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # each is one token, whose text is one chunk


def registration(role: Role, name: str, *, max_running: int = 4096, share: int | None = None) -> Register:
    """How a node without an engine registers."""
    return Register(
        role=role, name=name, model=SMALL_MODEL_NAME, digest="bench", weight_version="bench", vocab_size=4096,
        context_length=1 << 20, eos_token_ids=(), generation={}, layout=LayoutMessage(1, 1, 8, 16, "float32"),
        num_pages=1 << 20, max_running=max_running, max_queued=4096, transports=("shm",),
        address="127.0.0.1:9", pid=0, device="none", share=share,
    )  # fmt: skip


class ScriptedNode:
    """A node without an engine.

    Args:
        on_generate: called with each request.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        control: str,
        role: Role,
        on_generate: Callable[[Generate], None],
        keys: CurveKeys | None,
    ) -> None:
        self._on_generate = on_generate
        self.registered = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        me = new_incarnation("" if keys is None else keys.fingerprint)
        curve = None if keys is None else keys.client(keys.gateway)
        self._mailbox = Mailbox(context, me, FromGateway, connect=f"tcp://{control}", curve=curve)
        self._is_drain_due = False
        self._due: list[Message] = []
        self._fd = int(self._mailbox.sockets[0].get(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._mailbox.send(registration(role, role))
        self._beat()

    def send(self, *messages: Message) -> None:
        """Send messages together with all others that are due now, as a node does after a step."""
        self._due += messages
        self._drain_soon()

    def close(self) -> None:
        self._later.cancel()
        self._loop.remove_reader(self._fd)
        self._mailbox.close()

    def _beat(self) -> None:
        self._mailbox.send(Heartbeat(0, 0, 0, 0, 0, {}))
        self._later = self._loop.call_later(1.0, self._beat)
        self._drain_soon()

    def _drain_soon(self) -> None:
        if not self._is_drain_due:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        if self._due:
            self._mailbox.send(*self._due)
            self._due.clear()
        for envelope in self._mailbox.receive():
            if isinstance(envelope.message, Generate):
                self._on_generate(envelope.message)
            elif isinstance(envelope.message, Registered):
                self.registered.set()


class ScriptedPair:
    """A prefill node and a decode node.

    Args:
        letters: token ids of ``LETTERS``, which the streams repeat.
        has_spans: the nodes report the stages of requests, as real ones do.
    """

    def __init__(self, control: str, letters: list[int], keys: CurveKeys | None, *, has_spans: bool = True) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._letters = letters
        self._has_spans = has_spans
        self._is_streaming = False
        self._begun: asyncio.Queue[Generate] = asyncio.Queue()
        self._prefill = ScriptedNode(self._context, control, "prefill", self._on_prompt, keys)
        self._decode = ScriptedNode(self._context, control, "decode", self._on_decode, keys)

    async def ready(self) -> None:
        await self._prefill.registered.wait()
        await self._decode.registered.wait()

    def stream(self, is_streaming: bool) -> None:
        self._is_streaming = is_streaming

    async def begun(self) -> Advance:
        generate = await self._begun.get()
        indices = count()

        def advance(connection: Connection) -> None:
            index = next(indices)
            node = self._decode if index else self._prefill
            if index < 2 and self._has_spans:
                node.send(Spans(generate.rid, generate.attempt, DECODE_SPANS if index else PREFILL_SPANS))
            node.send(Tokens(generate.rid, generate.attempt, index, (self._letters[index % len(self._letters)],)))

        return advance

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()
        self._context.destroy(linger=0)

    def _on_prompt(self, generate: Generate) -> None:
        if self._is_streaming:
            self._begun.put_nowait(generate)
            return
        if self._has_spans:
            self._prefill.send(Spans(generate.rid, generate.attempt, PREFILL_SPANS))
        finish: Literal["", "length"] = "length" if generate.decode is None else ""
        self._prefill.send(Tokens(generate.rid, generate.attempt, 0, generate.prompt[:1], finish=finish))

    def _on_decode(self, generate: Generate) -> None:
        """Send the second of two tokens; streams get theirs as they advance."""
        if self._is_streaming:
            return
        if self._has_spans:
            self._decode.send(Spans(generate.rid, generate.attempt, DECODE_SPANS))
        self._decode.send(Tokens(generate.rid, generate.attempt, 1, generate.prompt[:1], finish="length"))


@contextlib.asynccontextmanager
async def baton(
    cores: set[int], *, name: str = "baton", options: Sequence[str] = (), has_spans: bool = True
) -> AsyncIterator[Gateway]:
    """Run a gateway with these further options and a pair of scripted nodes, with the keys of this user by default."""
    tokenizer = Tokenizer.load(Path(SMALL_MODEL))
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in LETTERS]
    words = [
        sys.executable, "-m", "gateway", "--model", SMALL_MODEL, "--served-model-name", SMALL_MODEL_NAME,
        "--port", "0", "--control-port", "0", "--max-queued-requests", "4096",
        "--no-log-requests",  # the peers log errors alone
        "--node-timeout", str(NODE_TIMEOUT_S),
        *options,
    ]  # fmt: skip
    keys = load_keys(None, is_insecure="--insecure" in options, role="node")
    async with pinned_process(words, cores) as process:
        assert process.stderr is not None
        control = (await process.stderr.readline()).decode().split()[-1]
        url = (await process.stderr.readline()).decode().split()[-1]
        nodes = ScriptedPair(control, letters, keys, has_spans=has_spans)
        try:
            await asyncio.wait_for(nodes.ready(), 30.0)
            yield Gateway(name, process.pid, urlsplit(url).port or 0, nodes)
        finally:
            nodes.close()
