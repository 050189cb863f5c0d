"""The parts of a body are counted before it is decoded, without blocking the event loop."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateway.fake_nodes import running

from common.errors import ErrorCode, RequestError
from gateway.http.limits import LIGHT_BYTES, MAX_DECIMALS, MAX_DEPTH, MAX_PARTS, PIECE_BYTES, ValueCounter, check_weight

TEXTS = st.text(alphabet='ab",[{\\:\n\u00e9', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int]:
    """The numbers of strings, lists and objects in a value, and of commas in its JSON."""
    if isinstance(value, str):
        return 1, 0
    if isinstance(value, dict):
        value = [*value, *value.values()]
        num_commas = max(len(value) // 2 - 1, 0)
    elif isinstance(value, list):
        num_commas = max(len(value) - 1, 0)
    else:
        return 0, 0
    inner = [counted(item) for item in value]
    return 1 + sum(parts for parts, _ in inner), num_commas + sum(commas for _, commas in inner)


def depth_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


@given(VALUES, st.booleans(), st.integers(1, 7))
def test_any_body_is_counted_correctly_whole_and_in_pieces(value: Any, is_ascii: bool, piece_bytes: int) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    whole = ValueCounter()
    whole.add(body)
    assert (whole.num_parts, whole.num_values) == counted(value)
    assert whole.depth == depth_of(value)
    in_pieces = ValueCounter()
    start = 0
    while start < len(body):
        end = start + piece_bytes
        while (len(body[start:end]) - len(body[start:end].rstrip(b"\\"))) % 2:
            end += 1
        in_pieces.add(body[start:end])
        start = end
    assert (in_pieces.num_parts, in_pieces.num_values) == counted(value)
    assert in_pieces.depth == depth_of(value)


@pytest.mark.parametrize(
    ("body", "is_too_much"),
    [
        (b"[" + b"[]," * (MAX_PARTS - 2) + b"[]]", False),
        (b"[" + b"[]," * (MAX_PARTS - 1) + b"[]]", True),
        (b"[" + b'"",' * (MAX_PARTS - 2) + b'""]', False),
        (b"[" + b'"",' * (MAX_PARTS - 1) + b'""]', True),
        (b"[" + b"1," * 10 + b"1]", False),
        (b"[" + b"1," * 11 + b"1]", True),
        (b'"' + b'\\",[{' * 200_000 + b'"', False),  # one string over several pieces
        (b'"' + b"\\\\" * PIECE_BYTES + b'",' + b"1," * 20, True),
        (b'"' + b"\\\\" * PIECE_BYTES + b'\\",,,,,,,,,,,,,,,,,,,,"', False),  # no escape is cut in two
    ],
)
async def test_a_body_with_too_many_parts_is_refused(body: bytes, is_too_much: bool) -> None:
    most = MAX_PARTS if b'""' in body or b"[]" in body else 10
    if is_too_much:
        with pytest.raises(RequestError) as refused:
            await check_weight(body, most)
        assert (refused.value.code, refused.value.status) == (ErrorCode.BODY_TOO_LARGE, 413)
    else:
        await check_weight(body, most)


@pytest.mark.parametrize("number", [b"7.69", b"769e-5", b"769E5"])
async def test_a_body_with_too_many_decimals_is_refused(number: bytes) -> None:
    """Ten of them take longer than a text, list or object; those inside a string cost nothing."""
    for count in (MAX_DECIMALS, MAX_DECIMALS + 1):
        body = b"[" + b",".join([number] * count) + b', true, false, "' + number * 100_000 + b'"]'
        if count > MAX_DECIMALS:
            with pytest.raises(RequestError, match="16384 points and exponents of numbers"):
                await check_weight(body, 1_000_000)
        else:
            await check_weight(body, 1_000_000)


async def test_counting_a_large_body_yields_to_the_event_loop() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(others())
    await check_weight(b'"' + b"a" * 10 * PIECE_BYTES + b'"', 10)
    task.cancel()
    assert turns >= 10


async def test_too_many_messages_and_too_many_token_ids_are_refused(folder) -> None:
    async with running(folder) as stack:
        await stack.pair(context_length=300_000, num_pages=20_000)
        message = {"role": "user", "content": "Hi"}
        for path, body, status, words in [
            ("/v1/chat/completions", {"messages": [message] * 14_000}, 413, "65536 texts, lists and objects"),
            ("/tokenize", {"messages": [message] * 14_000}, 413, "65536 texts, lists and objects"),
            ("/tokenize", {"messages": [message] * 12_000}, 200, ""),
            ("/v1/completions", {"prompt": [65] * 290_000, "max_tokens": 1}, 200, ""),  # the context has room
            ("/v1/completions", {"prompt": [65] * 310_000, "max_tokens": 1}, 413, "300000 values"),
        ]:
            assert len(json.dumps(body)) > LIGHT_BYTES
            got, answer = await stack.post(path, body)
            assert got == status, str(answer)[:200]
            if words:
                assert answer["error"]["code"] == "body_too_large"
                assert answer["error"]["message"] == f"the body has more than {words}"


def chat_of(depth: int) -> bytes:
    """A chat whose tool has parameters that make the body this deep."""
    inner = depth - 4
    chat = b'{"messages": [{"role": "user", "content": "[Hi"}], "tools": [{"function": {"name": "f", "parameters": '
    return chat + b'{"a": ' * inner + b"1" + b"}" * inner + b"}}]}"


async def test_a_body_that_is_nested_too_deeply_is_refused_before_it_is_decoded(folder) -> None:
    """Decoders bear almost a thousand levels. What encodes the value again would fail at a few less, with a 500."""
    async with running(folder) as stack:
        await stack.pair(context_length=300_000, num_pages=20_000)
        for depth in (MAX_DEPTH, MAX_DEPTH + 1, *range(950, 1_000)):
            async with stack.client.post(
                f"{stack.url}/tokenize", data=chat_of(depth), headers={"content-type": "application/json"}
            ) as answer:
                content = await answer.json()
            assert answer.status == (200 if depth <= MAX_DEPTH else 400), depth
            if depth > MAX_DEPTH:
                assert content["error"]["message"] == f"the body is nested more than {MAX_DEPTH} levels deep"
