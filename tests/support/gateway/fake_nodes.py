"""A small tokenizer, and nodes without an engine for tests of the gateway alone.

A ``FakeNode`` runs on the test's event loop and speaks the real control protocol over real sockets. By default a pair
repeats the tokens of the prompt: the prefill node sends output token 0 and the decode node the rest, or all of them for
a local prefill. A test sets ``on_generate`` to change that.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import zmq
from support.wire.raw_peers import node_keys
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from common.config.gateway import GatewayConfig
from common.errors import ErrorCode
from common.sampling_params import TokenLogprobs
from common.stage_spans import StageSpan
from common.wire.mailbox import Mailbox
from common.wire.messages import (
    Abort,
    Adapter,
    Adapters,
    AdapterUnused,
    Decision,
    Decisions,
    Deregister,
    Failed,
    Find,
    Flush,
    Flushed,
    Found,
    FromGateway,
    Generate,
    GetDecisions,
    Heartbeat,
    KeptOutput,
    LayoutMessage,
    LoadAdapter,
    Message,
    ProfileAnswer,
    Refused,
    Register,
    Registered,
    Spans,
    StartProfile,
    StopProfile,
    Tokens,
    Unknown,
    UnloadAdapter,
)
from common.wire.packed_logprobs import pack_logprobs
from common.wire.process_id import new_incarnation
from gateway.server import Gateway
from gateway.workers.served_models import load_models, model_folders

CORPUS = [
    "Shall I compare thee to a summer's day? Thou art more lovely and more temperate:",
    "Rough winds do shake the darling buds of May, and summer's lease hath all too short a date;",
    "Größe, naïve café, 你好世界, こんにちは, 🙂🚀 and the end of the line.",
]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS = "<|im_end|>"
MODEL = "tiny"
PADDED_VOCAB = 512
#: Nodes beat in the thread of the test, which may have no core for seconds.
NODE_TIMEOUT_S = 600.0


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer of about 320 ids, the last few of them special."""
    tokenizer = Tokenizer(models.BPE())
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", EOS)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("né €", special=False)])
    return tokenizer


def make_model_folder(folder: Path) -> Path:
    """Write the files of a checkpoint that the gateway reads."""
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "chat_template": TEMPLATE,
        "eos_token": EOS,
        "bos_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_register(role: str, name: str, **changes: Any) -> Register:
    """Return the registration of a node of the tiny model."""
    fields: dict[str, Any] = {
        "role": role,
        "name": name,
        "model": MODEL,
        "digest": "d1",
        "weight_version": "w1",
        "vocab_size": PADDED_VOCAB,
        "context_length": 512,
        "eos_token_ids": (322,),
        "generation": {},
        "layout": LayoutMessage(2, 2, 16, 16, "float32"),
        "num_pages": 64,
        "max_running": 8,
        "max_queued": 16,
        "transports": ("shm",),
        "address": "127.0.0.1:9" if role == "prefill" else "",
        "pid": 1,
        "device": "fake",
    }
    return Register(**{**fields, **changes})


class FakeNode:
    """A node without an engine; each object has its own process id.

    Attributes:
        received: every message from the gateway, in order.
        generates, aborts: ``Generate`` by rid, and rids of ``Abort``, except those of ``round_trip``.
        on_generate: called with the node and each ``Generate``; ``echo`` by default.
        num_cached_pages: the reply to ``Flush``; None for no reply.
        decisions: the reply to ``GetDecisions``; None for no reply.
        kept: the outputs from which it replies to ``Find``; None for no reply.
        profile: the reply to ``StartProfile`` and ``StopProfile``; None for no reply.
        adapter_error: why it loads and unloads no adapters; None for no reply. The digest of an adapter follows from
            its path.
    """

    def __init__(
        self, control_address: str, role: str, name: str = "", *, attempts: dict[str, int] | None = None, **changes: Any
    ) -> None:
        self.role = role
        self.register = make_register(role, name or role, **changes)
        keys = node_keys()
        self.incarnation = new_incarnation(keys.fingerprint)
        self.received: list[Any] = []
        self.generates: dict[str, Generate] = {}
        self._attempts = {} if attempts is None else attempts
        self.aborts: list[str] = []
        self.on_generate: Callable[[FakeNode, Generate], None] = echo
        self.is_beating = True
        self.num_cached_pages: int | None = 5
        self.decisions: tuple[Decision, ...] | None = ()
        self.kept: tuple[KeptOutput, ...] | None = ()
        self.profile: ProfileAnswer | None = ProfileAnswer(file=f"/traces/{self.register.name}.trace.json.gz")
        self.adapter_error: str | None = ""
        self._unloads: list[UnloadAdapter] = []  # that are not over
        self._context = zmq.Context()
        self.mailbox = Mailbox(
            self._context,
            self.incarnation,
            FromGateway,
            connect=f"tcp://{control_address}",
            curve=keys.client(keys.gateway),
        )
        self._changed = asyncio.Event()
        self._round_trips = map("round trip {}".format, itertools.count())
        self._work = asyncio.get_running_loop().create_task(self._run())

    def send(self, message: Message) -> None:
        self.mailbox.send(message)

    def tokens(self, rid: str, index: int, tokens: tuple[int, ...], **fields: Any) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            fields[name] = tuple(map(pack_logprobs, fields.get(name, ())))
        self.send(Tokens(rid, self.attempt(rid), index, tokens, **fields))

    def spans(self, rid: str, *spans: StageSpan) -> None:
        self.send(Spans(rid, self.attempt(rid), spans))

    def fail(self, rid: str, code: ErrorCode, message: str = "failed by the test") -> None:
        self.send(Failed(rid, self.attempt(rid), code, message))

    def attempt(self, rid: str) -> int:
        """Return the attempt number of a request that any node of the stack has received; 0 if none has."""
        return self.generates[rid].attempt if rid in self.generates else self._attempts.get(rid, 0)

    def leave(self) -> None:
        self.send(Deregister())

    def beat(self, **counters: float) -> None:
        self.send(Heartbeat(0, len(self.generates), 10, 5, 0, counters))

    async def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        """Wait until a condition on the received messages holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def round_trip(self) -> None:
        """Wait until the gateway has received all messages of this node and
        the node has received all messages sent to it by then.

        The gateway answers tokens of a request that it does not know, and a connection keeps its order.
        """
        rid = next(self._round_trips)
        self.send(Tokens(rid, 0, 0, (65,)))
        await self.until(lambda: Abort(rid, 0) in self.received)

    @property
    def is_registered(self) -> bool:
        return any(isinstance(message, Registered) for message in self.received)

    async def registered(self) -> "FakeNode":
        await self.until(lambda: self.is_registered)
        return self

    async def only_rid(self) -> str:
        """Wait for the only request of this node; return its id."""
        await self.until(lambda: self.generates)
        (rid,) = self.generates
        return rid

    async def until_refused(self) -> "FakeNode":
        await self.until(lambda: self.refusal)
        return self

    @property
    def refusal(self) -> str:
        return next((message.reason for message in self.received if isinstance(message, Refused)), "")

    async def _run(self) -> None:
        next_beat = 0.0
        loop = asyncio.get_running_loop()
        while True:
            is_unknown = any(isinstance(letter.message, Unknown) for letter in self._receive())
            if self.mailbox.connection_events().connected or is_unknown:
                self.send(self.register)
            if self.is_beating and self.is_registered and loop.time() > next_beat:
                next_beat = loop.time() + 0.2
                self.beat(steps_total=3.0)
            await asyncio.sleep(0.002)

    def _receive(self) -> list[Any]:
        letters = self.mailbox.receive()
        for letter in letters:
            self.received.append(letter.message)
            if isinstance(letter.message, Generate):
                for sample in letter.message.samples():
                    self.generates[sample.rid] = sample
                    self._attempts[sample.rid] = sample.attempt
                    self.on_generate(self, sample)
            elif isinstance(letter.message, Abort):
                if not letter.message.rid.startswith("round trip"):
                    self.aborts.append(letter.message.rid)
            elif isinstance(letter.message, Find) and self.kept is not None:
                outputs = tuple(output for output in self.kept if output.key in letter.message.keys)
                self.send(Found(outputs, letter.message.number))
            elif isinstance(letter.message, Flush) and self.num_cached_pages is not None:
                self.send(Flushed(self.num_cached_pages, letter.message.number))
            elif isinstance(letter.message, GetDecisions) and self.decisions is not None:
                self.send(Decisions(self.decisions[-letter.message.limit :], letter.message.number))
            elif isinstance(letter.message, StartProfile | StopProfile) and self.profile is not None:
                self.send(msgspec.structs.replace(self.profile, number=letter.message.number))
            elif isinstance(letter.message, LoadAdapter | UnloadAdapter) and self.adapter_error is not None:
                self._change_adapter(letter.message)
            elif isinstance(letter.message, AdapterUnused):
                self._drop_adapter(letter.message.adapter)
        if letters:
            self._changed.set()
        return letters

    def _change_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        known = {one.name: one for one in self.register.adapters}
        if isinstance(message, UnloadAdapter) and message.name in known and not self.adapter_error:
            withdrawn = msgspec.structs.replace(known[message.name], change=message.change, is_withdrawn=True)
            self.set_adapters(*{**known, message.name: withdrawn}.values())
            self._unloads.append(message)
            return
        if isinstance(message, LoadAdapter) and not self.adapter_error:
            loaded = adapter(message.name, message.path, path=message.path, change=message.change)
            unloaded = {name: number for name, number in self.register.unloaded.items() if name != message.name}
            self.register = msgspec.structs.replace(self.register, unloaded=unloaded)
            self.set_adapters(*{**known, message.name: loaded}.values())
        elif not self.adapter_error:
            self._note_unloaded(message)
        self.send(self._adapters(self.adapter_error or "", message.number))

    def _drop_adapter(self, adapter: str) -> None:
        self.set_adapters(*(one for one in self.register.adapters if one.id != adapter))
        names = {one.name for one in self.register.adapters}
        for message in [one for one in self._unloads if one.name not in names]:
            self._unloads.remove(message)
            self._note_unloaded(message)
            self.send(self._adapters(number=message.number))

    def _note_unloaded(self, message: LoadAdapter | UnloadAdapter) -> None:
        unloaded = {**self.register.unloaded, message.name: message.change}
        self.register = msgspec.structs.replace(self.register, unloaded=unloaded)

    def set_adapters(self, *adapters: Adapter) -> None:
        """Change the adapters, and tell the gateway."""
        self.register = msgspec.structs.replace(self.register, adapters=adapters)
        self.send(self._adapters())

    def _adapters(self, error: str = "", number: int = 0) -> Adapters:
        return Adapters(self.register.adapters, self.register.unloaded, error, number)

    async def kill(self, last_words: Callable[[], None] = lambda: None) -> None:
        """Disconnects; ``last_words`` may send messages before."""
        if self._work.done():
            return
        self._work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._work
        last_words()
        self.mailbox.close()
        self._context.term()


def adapter(name: str, content: str, **fields: Any) -> Adapter:
    """Return an adapter whose digest follows from ``content``."""
    return Adapter(name, hashlib.md5(content.encode()).hexdigest(), **fields)


def echo(node: FakeNode, generate: Generate) -> None:
    """Repeat the tokens of the prompt up to ``max_new_tokens``, after those of earlier attempts."""
    prompt, limit = generate.prompt, generate.sampling.max_new_tokens
    output = tuple(prompt[i % len(prompt)] for i in range(limit))
    with_logprobs = generate.sampling.logprobs is not None
    logprobs = tuple(
        TokenLogprobs(-0.5, tuple((token + i, -0.5 - i) for i in range(generate.sampling.logprobs or 0)))
        for token in output
        if with_logprobs
    )
    begun = len(generate.output)
    if not begun and (node.role == "prefill" or generate.prefill is None):
        node.spans(generate.rid, StageSpan("prefill_queue", 1.0, 0.25), StageSpan("prefill", 1.25, 0.5, len(prompt)))
        node.tokens(
            generate.rid,
            0,
            output[:1],
            logprobs=logprobs[:1],
            cached_tokens=len(prompt) // 2,
            finish="length" if limit == 1 else "",
            prompt_logprobs=prompt_logprobs_of(generate),
        )
    if node.role == "prefill":
        return
    for i in range(max(begun, 1), limit):
        finish = "length" if i == limit - 1 else ""
        if i == 1 and generate.prefill is not None:
            node.spans(generate.rid, StageSpan("decode_queue", 2.0, 0.125), StageSpan("transfer", 2.125, 1.0, 3))
        node.tokens(generate.rid, i, output[i : i + 1], logprobs=logprobs[i : i + 1], finish=finish)


def prompt_logprobs_of(generate: Generate) -> tuple[TokenLogprobs, ...]:
    """Return -i as the log-probability of the prompt token at position i, with the next ids as alternatives."""
    first, count = generate.sampling.prompt_logprobs_from, generate.sampling.logprobs or 0
    if first is None:
        return ()
    places = range(first, len(generate.prompt))
    assert places
    return tuple(
        TokenLogprobs(-float(i), tuple((generate.prompt[i] + k, -float(k)) for k in range(count))) for i in places
    )


def silent(node: FakeNode, generate: Generate) -> None:
    """Send nothing; the test sends messages itself."""


class Stack:
    """A gateway on free ports, its fake nodes, and a client."""

    def __init__(self, gateway: Gateway, client: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.client = client
        self.nodes: list[FakeNode] = []
        self._attempts: dict[str, int] = {}

    @property
    def url(self) -> str:
        return self.gateway.http_address

    async def node(self, role: str, name: str = "", **changes: Any) -> FakeNode:
        """Add a registered node."""
        return await self.joining(role, name, **changes).registered()

    def joining(self, role: str, name: str = "", **changes: Any) -> FakeNode:
        """Add a node that has not registered yet."""
        self.nodes.append(FakeNode(self.gateway.control_address, role, name, attempts=self._attempts, **changes))
        return self.nodes[-1]

    async def pair(self, **changes: Any) -> tuple[FakeNode, FakeNode]:
        return await self.node("prefill", **changes), await self.node("decode", **changes)

    async def silent_pair(self, **changes: Any) -> tuple[FakeNode, FakeNode]:
        """A pair that sends nothing; the test sends messages itself."""
        prefill, decode = await self.pair(**changes)
        prefill.on_generate = decode.on_generate = silent
        return prefill, decode

    def silence(self) -> None:
        """Make all nodes send nothing."""
        for node in self.nodes:
            node.on_generate = silent

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Return status and JSON of a response."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Content-Type": "application/json", **headers}
        async with self.client.post(self.url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.client.get(self.url + path, headers=headers) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def stream(self, path: str, body: Any) -> list[Any]:
        """Return the events of a stream: decoded JSON, or the text ``[DONE]``."""
        async with self.client.post(self.url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            return [event async for event in events(answer)]


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Yield server-sent events as they arrive."""
    async for line in answer.content:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


@contextlib.asynccontextmanager
async def running(
    folder: Path, *, options: dict[str, Any] | None = None, fields: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Stack]:
    """Start a gateway with the tiny model; ``fields`` are those of its ``ServedModel`` that differ."""
    values: dict[str, Any] = {"port": 0, "control_port": 0, "served_model_name": MODEL, "model": str(folder)}
    values |= {"node_timeout": NODE_TIMEOUT_S, **config}
    resolved = GatewayConfig(**values)
    served = load_models(resolved, model_folders(resolved))
    served = {name: dataclasses.replace(model, **(fields or {})) for name, model in served.items()}
    gateway = Gateway(resolved, served, **(options or {}))
    await gateway.start()
    async with aiohttp.ClientSession() as client:
        stack = Stack(gateway, client)
        try:
            yield stack
        finally:
            await gateway.stop()
            for node in stack.nodes:
                await node.kill()


BODY = {"prompt": "a", "max_tokens": 9}


async def start_request(stack, body=BODY, path="/v1/completions"):
    """Send a request and wait until both nodes have received it; return its response task and its id."""
    prefill, decode = stack.nodes[:2]
    known = set(prefill.generates)
    call = asyncio.ensure_future(stack.client.post(stack.url + path, json=body))
    await prefill.until(lambda: set(prefill.generates) - known)
    (rid,) = set(prefill.generates) - known
    await decode.until(lambda: rid in decode.generates)
    return call, rid


async def error_of(call):
    async with await call as answer:
        return answer.status, (await answer.json())["error"]["code"]
