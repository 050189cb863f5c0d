"""Describes path functions of FastAPI whose bodies and answers are msgspec structs."""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.http.openapi import answers, generated
from gateway.http.openapi.examples import json_body
from gateway.http.protocol import anthropic, native, responses

#: Key of an operation, while the description is put together, with the statuses of its own errors.
FURTHER_ERRORS = "x-errors"
REF = "#/components/schemas/{name}"
#: The structs of bodies and answers of all path functions.
KINDS: tuple[type[msgspec.Struct], ...] = (
    native.TokenizeRequest,
    native.DetokenizeRequest,
    native.AbortRequest,
    native.PriorityChange,
    native.ProfileRequest,
    native.DrainRequest,
    native.RoleChange,
    native.LoadLoraRequest,
    native.UnloadLoraRequest,
    anthropic.CountTokensRequest,
    responses.ResponsesRequest,
    generated.Response,
    *(kind for kind in vars(answers).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)),
)


def described(
    answer: type[msgspec.Struct],
    body: type[msgspec.Struct] | None = None,
    *,
    summary: str,
    errors: Sequence[int] = (),
    needs_body: bool = True,
    is_list: bool = False,
) -> dict[str, Any]:
    """Arguments of a router's decorator that describe a body, an answer, and errors that most endpoints do not have.

    Args:
        is_list: the answer is a list of these.
    """
    assert answer in KINDS and (body is None or body in KINDS), "a struct in a description is one of KINDS"
    shape: dict[str, Any] = {"$ref": REF.format(name=answer.__name__)}
    shape = {"type": "array", "items": shape} if is_list else shape
    operation: dict[str, Any] = {
        FURTHER_ERRORS: list(errors),
        "responses": {"200": {"content": {"application/json": {"schema": shape}}}},
    }
    if body is not None:
        schema = {"$ref": REF.format(name=body.__name__)}
        operation["requestBody"] = json_body(body, schema, is_required=needs_body)
    return {"summary": summary, "openapi_extra": operation}
