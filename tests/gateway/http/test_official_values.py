"""Every value that the official clients' types allow is decoded, or refused as something that is not supported."""

import collections.abc
import functools
import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

import pytest
from anthropic.types import message_create_params as anthropic_messages
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chats
from openai.types.responses import response_create_params as openai_responses
from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

from common.errors import ErrorCode, RequestError
from gateway.http.protocol.anthropic import MessagesRequest
from gateway.http.protocol.decoding import Strict, decode
from gateway.http.protocol.openai import ChatCompletionRequest, CompletionRequest
from gateway.http.protocol.responses import ResponsesRequest

#: How many objects within each other are filled with each of their optional fields.
DEPTH = 3
#: A value of each type that has no parts.
PLAIN = {str: "a", int: 1, float: 0.5, bool: True, NoneType: None, object: {"name": "f"}}
LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)

#: Types around a type that change none of its values.
AROUND = (Annotated, Required, NotRequired)


@functools.cache
def fields_of(kind: Any) -> dict[str, Any] | None:
    """The types of an object's fields, those that it must have as ``Required``; None of what is no object."""
    if is_typeddict(kind):
        return get_type_hints(kind, include_extras=True)
    if isinstance(kind, type) and issubclass(kind, BaseModel):  # of an answer, which may come back
        fields = kind.model_fields.items()
        return {name: (Required if field.is_required() else NotRequired)[field.annotation] for name, field in fields}
    return None


def least(kind: Any) -> Any:
    """A value of a type, of an object its required fields only."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (*AROUND, Union, UnionType):
        return least(arguments[0])
    if origin is Literal:
        return arguments[0]
    if origin in LISTS:
        return [least(arguments[0])]
    if (fields := fields_of(kind)) is not None:
        return {name: least(field) for name, field in fields.items() if is_required(kind, name, field)}
    if origin in (dict, collections.abc.Mapping):
        return {"function" if arguments[1] is object else "1": least(arguments[1])}
    return PLAIN.get(kind, "a")  # a file is sent as text


def is_required(kind: Any, name: str, field: Any) -> bool:
    is_needed = is_typeddict(kind) and name in kind.__required_keys__
    return get_origin(field) is Required or (is_needed and get_origin(field) is not NotRequired)


def values(kind: Any, depth: int = DEPTH) -> Iterator[Any]:
    """A value of each member of a type, of an object also one with each of its optional fields."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in AROUND:
        yield from values(arguments[0], depth)
    elif origin in (Union, UnionType):
        for member in arguments:
            yield from values(member, depth)
    elif origin is Literal:
        yield from arguments
    elif origin in LISTS:
        yield from ([item] for item in values(arguments[0], depth))
    else:
        yield least(kind)
        for name, field in (fields_of(kind) or {}).items() if depth else ():
            yield from ({**least(kind), name: value} for value in values(field, depth - 1))


def complaint_about(kind: type[Strict], body: dict[str, Any]) -> str:
    """Why a body is refused, unless the error says that something is not supported, or which texts are."""
    try:
        decode(kind, json.dumps(body).encode())
    except RequestError as error:
        is_named = error.code is ErrorCode.NOT_SUPPORTED or "; it may be " in error.message
        return "" if is_named else error.message
    return ""


@pytest.mark.parametrize(
    ("params", "kind", "fields"),
    [
        (openai_chats.CompletionCreateParamsNonStreaming, ChatCompletionRequest, {}),
        (openai_completions.CompletionCreateParamsNonStreaming, CompletionRequest, {"prompt": "a"}),
        (openai_responses.ResponseCreateParamsNonStreaming, ResponsesRequest, {"input": "a"}),
        (anthropic_messages.MessageCreateParamsNonStreaming, MessagesRequest, {}),
    ],
)
def test_every_value_of_the_official_clients_is_decoded_or_refused_as_not_supported(params, kind, fields):
    body = {**least(params), **fields}
    for name, annotation in fields_of(params).items():
        for value in values(annotation):
            if (name, value) != ("prompt", None):  # OpenAI's own models begin a document then
                assert complaint_about(kind, {**body, name: value}) == "", (name, value)
