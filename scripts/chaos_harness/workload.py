"""The distinct requests of a run, determined by its seed, and the endless draw from them."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "native": "/generate"}
WORDS = (
    "king queen night day love death crown sword heart honour storm ship island daughter father ghost castle wood "
    "fool letter ring blood moon star rose thorn grave music dream sleep fire water gold silver lord lady"
).split()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class LoadRequest:
    """One distinct request.

    Attributes:
        kind: what it uses, such as ``greedy`` or ``grammar``.
    """

    number: int
    kind: str
    path: str
    body: bytes


def _greedy(drawn: random.Random) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": drawn.randint(8, 60), "ignore_eos": True}


def _long(drawn: random.Random) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


def _seeded(drawn: random.Random) -> dict[str, Any]:
    return {
        "temperature": 0.9, "top_p": 0.95, "top_k": 50,
        "seed": drawn.randrange(1 << 30), "max_tokens": drawn.randint(8, 60),
    }  # fmt: skip


def _stopped(drawn: random.Random) -> dict[str, Any]:
    return {**_seeded(drawn), "stop": ["e the", "\n\n", ", and"], "max_tokens": 60}


def _penalized(drawn: random.Random) -> dict[str, Any]:
    return {**_greedy(drawn), "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.4}


def _logprobs(drawn: random.Random) -> dict[str, Any]:
    return {**_greedy(drawn), "logprobs": 3}


def _samples(drawn: random.Random) -> dict[str, Any]:
    return {**_seeded(drawn), "n": 2}


def _regex(drawn: random.Random) -> dict[str, Any]:
    return {**_seeded(drawn), "guided_regex": "(King|Queen) [A-Z][a-z]{3,8} has [0-9]{1,4} (ships|swords)"}


def _schema(drawn: random.Random) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    return {**_seeded(drawn), "response_format": form, "max_tokens": 60}


def _urgent(drawn: random.Random) -> dict[str, Any]:
    return {**_seeded(drawn), "priority": drawn.choice([1, 5, 20])}


#: What a request may use; requests take turns through this table.
KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "greedy": _greedy,
    "seeded": _seeded,
    "stop strings": _stopped,
    "penalties": _penalized,
    "logprobs": _logprobs,
    "n=2": _samples,
    "regex": _regex,
    "JSON schema": _schema,
    "priority": _urgent,
    "long": _long,
    "chat": _seeded,
    "native": _greedy,
}


def margin_body(request: LoadRequest) -> bytes:
    """A request for the same greedy output with the log-probabilities of the two likeliest tokens; empty if the output
    is not simply greedy.
    """
    if request.kind not in ("greedy", "logprobs", "long"):
        return b""
    fields = {name: value for name, value in json.loads(request.body).items() if name != "stream_options"}
    return json.dumps({**fields, "stream": False, "logprobs": 2}).encode()


def distinct_requests(count: int, seed: int, model: str) -> list[LoadRequest]:
    drawn = random.Random(f"requests of {seed}")
    names = list(KINDS)
    return [_request(number, names[number % len(names)], drawn, model) for number in range(count)]


def _request(number: int, kind: str, drawn: random.Random, model: str) -> LoadRequest:
    fields = KINDS[kind](drawn)
    is_streamed = drawn.random() < 0.75
    shared = "" if drawn.random() < 0.5 else "Enter the king with all his court, and trumpets sound from afar. "
    text = shared + " ".join(drawn.choices(WORDS, k=drawn.randint(4, 90)))
    if kind == "native":
        sampling = {"temperature": 0, "max_new_tokens": fields["max_tokens"], "ignore_eos": True}
        body: dict[str, Any] = {"text": text, "sampling_params": sampling, "stream": is_streamed}
        return LoadRequest(number, kind, PATHS["native"], json.dumps(body).encode())
    common = {"model": model, "stream": is_streamed, "return_token_ids": True, **fields}
    if is_streamed:
        common["stream_options"] = {"include_usage": True}
    if kind == "chat":
        body = {**common, "messages": [{"role": "user", "content": text}]}
        return LoadRequest(number, kind, PATHS["chat"], json.dumps(body).encode())
    return LoadRequest(number, kind, PATHS["completions"], json.dumps({**common, "prompt": text}).encode())


def keyed(request: LoadRequest, key: str) -> tuple[LoadRequest, str]:
    """The request with a key, by which gateways know it when it is sent again, and the header lines for that.

    ``/generate`` has its ``rid``, the other paths have a header.
    """
    if request.path != PATHS["native"]:
        return request, f"Idempotency-Key: {key}\r\n"
    body = json.dumps({**json.loads(request.body), "rid": key}).encode()
    return replace(request, body=body), ""


def draws(requests: list[LoadRequest], seed: int) -> Iterator[LoadRequest]:
    """Requests without end, in an order that depends on the seed only."""
    drawn = random.Random(f"draws of {seed}")
    while True:
        yield drawn.choice(requests)
