"""A gateway and fake nodes whose model writes ``(reasoning)answer[name|arguments]``, as a test tells it to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from support.gateway.fake_nodes import Stack, make_tokenizer, running, silent
from support.gateway.toy_formats import TOY_FORMATS

from common.errors import ErrorCode
from common.sampling_params import TokenLogprobs
from common.wire.messages import Generate
from gateway.text.output_formats import ModelFormats
from gateway.text.tokenizer import Tokenizer

TEXT = Tokenizer(make_tokenizer())
EOS_ID = 322


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TEXT.encode(text, add_special_tokens=False))


@contextlib.asynccontextmanager
async def toy_stack(folder: Path, formats: ModelFormats = TOY_FORMATS, **config: Any) -> AsyncIterator[Stack]:
    async with running(folder, fields={"formats": formats}, **config) as stack:
        await stack.pair()
        yield stack


def answers(stack: Stack, text: str, finish: str = "stop") -> None:
    """Make the nodes answer with this text, up to ``max_new_tokens``, one token in each message; token i has the
    log-probability -i.
    """
    prefill, decode = stack.nodes
    ids = (*ids_of(text), EOS_ID) if finish == "stop" else ids_of(text)

    def logprobs(generate: Generate, i: int) -> tuple[TokenLogprobs, ...]:
        wanted = generate.sampling.logprobs
        return () if wanted is None else (TokenLogprobs(-i, ((ids[i], -i), (65, -9.0))[:wanted]),)

    def first(node: Any, generate: Generate) -> None:
        node.tokens(generate.rid, 0, ids[:1], cached_tokens=3, logprobs=logprobs(generate, 0))

    def rest(node: Any, generate: Generate) -> None:
        num_tokens = min(len(ids), generate.sampling.max_new_tokens)
        reason = finish if num_tokens == len(ids) else "length"
        for i in range(1, num_tokens):
            is_last = i == num_tokens - 1
            node.tokens(
                generate.rid, i, ids[i : i + 1], finish=reason if is_last else "", logprobs=logprobs(generate, i)
            )

    prefill.on_generate, decode.on_generate = first, rest


def last_generate(stack: Stack) -> Generate:
    return list(stack.nodes[0].generates.values())[-1]


def last_prompt(stack: Stack) -> str:
    """The text of the prompt that the nodes have received last."""
    return TEXT.decode(last_generate(stack).prompt, skip_special=False)


async def failing_stream(stack: Stack, path: str, body: dict[str, Any]) -> bytes:
    """The stream of a request whose node fails after the first token has reached the client."""
    prefill, decode = stack.nodes
    prefill.on_generate = decode.on_generate = silent
    known = set(prefill.generates)
    call = asyncio.ensure_future(stack.client.post(stack.url + path, json={**body, "stream": True}))
    await prefill.until(lambda: set(prefill.generates) - known)
    (rid,) = set(prefill.generates) - known
    prefill.tokens(rid, 0, (65,))
    async with await call as answer:
        data = await answer.content.readany()
        prefill.fail(rid, ErrorCode.OUT_OF_PAGES, "no pages")
        return data + await answer.read()
