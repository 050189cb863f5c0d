"""Puts the API's description together: FastAPI's own part, the generating endpoints, and what all operations share."""

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.http.access.request_checks import OPEN_PATHS
from gateway.http.errors import ANTHROPIC_PATHS
from gateway.http.generate import Endpoint
from gateway.http.openapi.answers import AnthropicError, Error
from gateway.http.openapi.examples import json_body
from gateway.http.openapi.operations import FURTHER_ERRORS, KINDS, REF

#: Why a request to any endpoint fails, by status; those of a body and of generating are below.
ERRORS = {
    400: "The request is malformed", 401: "No valid key", 404: "No such path, model or request",
    421: "The host is not served", 431: "The headers are too large", 500: "A failure of the gateway",
}  # fmt: skip
#: Those of methods that change something.
CHANGE_ERRORS = {
    403: "It needs an admin's key, or a web page of another site has sent it", 503: "The server is stopping",
}  # fmt: skip
BODY_ERRORS = {
    400: "A field is wrong", 408: "The body came too slowly", 411: "The body has no length",
    413: "The body is too large", 415: "The body is not JSON", 503: "The server is stopping, or no node is ready",
}  # fmt: skip
GENERATE_ERRORS = {
    409: "Another gateway has taken the request over", 422: "The Idempotency-Key belongs to another request",
    429: "Too many requests; Retry-After says when to come back", 499: "The request was aborted",
    502: "A node was lost, or a transfer failed", 504: "The request's deadline has passed",
}  # fmt: skip
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
REQUEST_ID_HEADER = {
    "description": "The client's own x-request-id, or a new one.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128},
}


def complete(document: dict[str, Any], endpoints: Iterable[Endpoint]) -> None:
    """Add to FastAPI's document what FastAPI does not know."""
    endpoints = list(endpoints)
    paths: dict[str, Any] = document.setdefault("paths", {})
    for operations in paths.values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # of FastAPI, whose errors of parameters have 400 here
    for endpoint in endpoints:
        paths[endpoint.path] = {method.lower(): _operation(endpoint, method) for method in endpoint.methods}
    for path, operations in paths.items():
        for method, operation in operations.items():
            _complete_operation(path, method, operation)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # the gateway's own envelope comes instead
        schemas.pop(name, None)
    kinds = [kind for endpoint in endpoints for kind in (endpoint.body, endpoint.answer, endpoint.event)]
    schemas.update(msgspec.json.schema_components([*kinds, *KINDS, Error, AnthropicError], ref_template=REF)[1])
    components["securitySchemes"] = KEYS
    components["headers"] = {"x-request-id": REQUEST_ID_HEADER}


def _operation(endpoint: Endpoint, method: str) -> dict[str, Any]:
    kinds = (endpoint.body, endpoint.answer, endpoint.event)
    body, answer, event = msgspec.json.schema_components(kinds, ref_template=REF)[0]
    answers: dict[str, Any] = {
        "200": {
            "description": "The whole answer, or with stream: true server-sent events.",
            "content": {
                "application/json": {"schema": answer},
                "text/event-stream": {"itemSchema": _server_sent_event(endpoint, event)},
            },
        }
    }
    for status, description in GENERATE_ERRORS.items():
        answers[str(status)] = _error(endpoint.path, description)
    answers["429"]["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return {
        "tags": ["generate"],
        "summary": endpoint.summary,
        "operationId": f"{method.lower()}{endpoint.path.replace('/', '_').replace('.', '_')}",
        "requestBody": json_body(endpoint.body, body),
        "responses": answers,
    }


def _server_sent_event(endpoint: Endpoint, event: dict[str, Any]) -> dict[str, Any]:
    """The schema of each event of a stream; the keyword ``itemSchema`` is OpenAPI 3.2's, and FastAPI's for streams."""
    data = _json_text(event)
    if endpoint.has_typed_events:
        fields = {"event": {"type": "string"}, "data": data}
    else:
        fields = {"data": {"anyOf": [_json_text({"anyOf": [event, _ref(Error)]}), {"const": "[DONE]"}]}}
    return {"type": "object", "properties": fields, "required": list(fields)}


def _json_text(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}


def _complete_operation(path: str, method: str, operation: dict[str, Any]) -> None:
    """Add errors, keys and headers to an operation."""
    answers: dict[str, Any] = operation.setdefault("responses", {})
    errors = dict(ERRORS)
    if method not in ("get", "head"):
        errors |= CHANGE_ERRORS
    if "requestBody" in operation:
        errors |= BODY_ERRORS
    elif "parameters" in operation:
        errors[400] = BODY_ERRORS[400]
    for status, description in errors.items():
        if path not in OPEN_PATHS or status not in (401, 404):
            answers.setdefault(str(status), _error(path, description))
    for status in operation.pop(FURTHER_ERRORS, ()):
        answers[str(status)] = _error(path, {**BODY_ERRORS, **GENERATE_ERRORS}[status])
    operation["security"] = [] if path in OPEN_PATHS else [{name: []} for name in KEYS]
    for answer in answers.values():
        answer.setdefault("headers", {})["x-request-id"] = {"$ref": "#/components/headers/x-request-id"}


def _error(path: str, description: str) -> dict[str, Any]:
    kind = AnthropicError if path.startswith(ANTHROPIC_PATHS) else Error
    return {
        "description": description,
        "content": {"application/json": {"schema": _ref(kind)}},
    }


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}
