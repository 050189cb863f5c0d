"""Structured output over HTTP: the prefill node samples the first token, the decode node the rest; no state is lost.

The state of a grammar is rebuilt from the tokens after a transfer, a retraction and a resume, so outputs always parse.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.service.client import Client
from support.service.service import running

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "speaker": {"enum": ["ROMEO", "JULIET", "First Citizen"]},
        "line": {"type": "string", "minLength": 10, "maxLength": 60},
        "mood": {"type": "array", "items": {"enum": ["glad", "grave"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["speaker", "line", "mood"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PATTERN = r"[A-Z][a-z]{2,9}( [a-z]{2,9}){6,12}[.!?]"
LIST = 'root ::= item (", " item){3,8}\nitem ::= [a-z]{3,9}\n'
SAMPLING: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "top_k": 40, "seed": 3}]
ROOMY, TINY = {"max_total_tokens": 8192}, {"max_total_tokens": 144, "num_reserved_decode_tokens": 0}


def requests() -> list[dict[str, Any]]:
    """Every kind of structured output with every way of sampling, after prompts of different lengths."""
    kinds = [{"json_schema": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}, {"regex": PATTERN}, {"ebnf": LIST}]
    return [
        {"text": "Speak, " * (number + 1), "sampling_params": {"max_new_tokens": 100, **kind, **sampling}}
        for number, (kind, sampling) in enumerate((kind, sampling) for kind in kinds for sampling in SAMPLING)
    ]


def check(body: dict[str, Any], answer: dict[str, Any]) -> None:
    """The text follows the request's schema, pattern or grammar to its end."""
    text, params = answer["text"], body["sampling_params"]
    assert answer["meta_info"]["finish_reason"]["type"] == "stop", text
    if "json_schema" in params:
        found = json.loads(text)
        assert found["speaker"] in SCHEMA["properties"]["speaker"]["enum"]
        assert 10 <= len(found["line"]) <= 60
        assert set(found["mood"]) <= {"glad", "grave"}
    elif "regex" in params:
        assert re.fullmatch(PATTERN, text), text
    else:
        assert re.fullmatch(r"[a-z]{3,9}(, [a-z]{3,9}){3,8}", text), text


async def answers(client: Client, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = await asyncio.gather(*(client.post("/generate", body) for body in bodies))
    assert [status for status, _ in found] == [200] * len(bodies), found
    return [answer for _, answer in found]


async def test_outputs_parse_across_prefill_decode_retraction_and_resume(tmp_path: Path) -> None:
    bodies = requests()
    expected: list[list[int]] = []
    options = {"page_size": 4, "chunked_prefill_size": 16}
    for pool in (ROOMY, TINY):
        with running(tmp_path / str(pool), node_options=options, only={"decode-0": pool}) as service:
            async with service.client() as client:
                found = await answers(client, bodies)
                totals = await client.settled()
        for body, answer in zip(bodies, found, strict=True):
            check(body, answer)
        expected.append([answer["output_ids"] for answer in found])
        assert totals["prefill-0"]["output_tokens"] == len(bodies), "the prefill node samples the first token of each"
        assert (totals["decode-0"]["retractions"] > 0) == (pool is TINY)
    assert expected[0] == expected[1]


async def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(tmp_path: Path) -> None:
    good, *_ = requests()
    with running(tmp_path / "logs") as service:
        async with service.client() as client:
            for params, param, words in (
                ({"regex": "a(b"}, "sampling_params.regex", "unclosed group"),
                (
                    {"json_schema": {"properties": {"a": {"type": "foo"}}}},
                    "sampling_params.json_schema.properties.a",
                    "Invalid type: foo",
                ),
                ({"ebnf": "start: <|unknown|>"}, "sampling_params.ebnf", "unknown special token"),  # found by the nodes
            ):
                bad = {**good, "sampling_params": params}
                (status, error), (_, answer) = await asyncio.gather(
                    client.post("/generate", bad), client.post("/generate", good)
                )
                assert status == 400
                assert words in error["error"]["message"]
                assert error["error"]["param"] == param
                check(good, answer)
            await client.settled()


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("local_prefill", ["always", "never"])
async def test_requests_go_on_while_a_grammar_is_compiled_and_its_request_may_leave(
    tmp_path: Path, local_prefill: str
) -> None:
    """The gateway checks these patterns at once; a node takes seconds of processor time for each."""
    slow = [f"{letter}?" * 7_500 for letter in "abc"]
    with running(tmp_path / "logs", gateway_options={"local_prefill": local_prefill}) as service:
        async with service.client() as client:
            exchanges = [client.begin("Speak", 4, ignore_eos=False, regex=pattern) for pattern in slow]
            await client.generate("Speak", 3)
            assert not any(exchange.arrivals for exchange in exchanges)
            await exchanges[2].leave()  # it waits for a thread of the compiler
            for exchange in exchanges[:2]:
                await exchange.end()
                assert exchange.error is None and not exchange.is_broken
                assert re.fullmatch("a*|b*", exchange.body["text"])
            await client.settled()


@pytest.mark.parametrize("is_local", [True, False])
async def test_streams_parse_with_a_decode_node_alone_too(tmp_path: Path, is_local: bool) -> None:
    gateway_options = {"local_prefill": "always" if is_local else "never"}
    with running(tmp_path / "logs", gateway_options=gateway_options) as service:
        async with service.client() as client:
            bodies = requests()
            exchanges = [
                client.begin(body["text"], 150, ignore_eos=False, **body["sampling_params"]) for body in bodies
            ]
            for body, exchange in zip(bodies, exchanges, strict=True):
                await exchange.end()
                assert exchange.error is None
                check(body, exchange.body)
