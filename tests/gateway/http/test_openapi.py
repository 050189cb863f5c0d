"""The API's description: complete, consistent, and true for real answers."""

import json
from typing import Any

import msgspec
import pytest
from support.gateway.fake_nodes import events, running

from gateway.http.openapi import answers, generated
from gateway.http.routes import unsupported

HI = [{"role": "user", "content": "Hi"}]
GENERATING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "ab", "max_tokens": 3}),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 3, "logprobs": 2, "echo": True, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 3, "n": 2, "logprobs": True, "return_token_ids": True}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}),
    ("/v1/messages", {"messages": HI, "max_tokens": 3}),
    ("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 3}}),
    ("/generate", {"text": ["ab", "c"], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}),
    ("/generate", {"text": "ab", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1,
                   "return_text_in_logprobs": True}),
]  # fmt: skip
WITHOUT_BODY = ("/flush_cache", "/stop_profile")
OTHERS: list[tuple[str, str, Any, Any]] = [
    ("GET", "/v1/models", None, answers.ModelList),
    ("GET", "/v1/models/tiny", None, answers.Model),
    ("GET", "/get_model_info", None, answers.ModelInfo),
    ("POST", "/tokenize", {"prompt": "ab"}, answers.Tokenized),
    ("POST", "/tokenize", {"prompt": ["ab", "c"]}, answers.Tokenized),
    ("GET", "/tokenizer_info", None, answers.TokenizerInfo),
    ("POST", "/detokenize", {"tokens": [65]}, answers.Detokenized),
    ("POST", "/detokenize", {"tokens": [[65], []]}, answers.Detokenized),
    ("POST", "/abort_request", {"abort_all": True}, answers.Aborted),
    ("POST", "/flush_cache", None, answers.CacheFlushed),
    ("POST", "/start_profile", {"num_steps": 3}, answers.Profile),
    ("POST", "/stop_profile", None, answers.Profile),
    ("GET", "/v1/workers", None, answers.WorkerList),
    ("GET", "/v1/workers/gateway/decisions", None, answers.DecisionList),
    ("GET", "/v1/workers/prefill/decisions?limit=3", None, answers.DecisionList),
    ("GET", "/health", None, answers.Health),
    ("GET", "/ready", None, answers.Ready),
    ("GET", "/server_info", None, answers.ServerInfo),
    ("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": HI}, answers.TokenCount),
    ("GET", "/nothing", None, answers.Error),
    ("POST", "/tokenize", {}, answers.Error),
    ("POST", "/v1/messages", {}, answers.AnthropicError),
    ("POST", "/v1/messages/count_tokens", {}, answers.AnthropicError),
]


def route_path(route):
    return getattr(route, "path", "")


def refs(value):
    """All references within a document."""
    if isinstance(value, dict):
        found = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return found + [ref for item in value.values() for ref in refs(item)]
    return [ref for item in value for ref in refs(item)] if isinstance(value, list) else []


async def test_the_description_names_every_endpoint_and_every_reference_leads_somewhere(stack):
    status, document = await stack.get("/openapi.json")
    assert status == 200
    app = stack.gateway._http._config.app
    served = set(map(route_path, app.routes))
    assert {"/v1/completions", "/generate", "/openapi.json"} <= served
    for path in ("/v1/models/{name}", "/v1/requests/{rid}/priority", "/v1/workers/{name}/decisions", "/metrics"):
        assert path in document["paths"]
    assert not set(unsupported.PATHS) & set(document["paths"])
    for ref in refs(document):
        place = document
        for key in ref.removeprefix("#/").split("/"):
            place = place[key]
    names = document["components"]["schemas"]
    assert not [name for name in names if "." in name], "two structs with one name"
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(ids)) == len(ids)


async def test_every_operation_describes_its_body_its_answers_and_its_errors(stack):
    _, document = await stack.get("/openapi.json")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], path
            whole = operation["responses"]["200"]["content"]
            assert all(content.get("schema") or content["itemSchema"] for content in whole.values()), path
            shape = whole.get("application/json", {}).get("schema", {})
            assert not {"$ref", "type"} <= set(shape), f"{path}: a reference with another type beside it"
            assert ("requestBody" in operation) == (method in ("post", "put") and path not in WITHOUT_BODY), path
            assert ("422" in operation["responses"]) == (operation["tags"] == ["generate"]), path
            for status, answer in operation["responses"].items():
                assert answer["headers"]["x-request-id"], path
                if status != "200":
                    kind = "AnthropicError" if path.startswith("/v1/messages") else "Error"
                    schema = answer["content"]["application/json"]["schema"]
                    assert schema == {"$ref": f"#/components/schemas/{kind}"}, path
    generating = document["paths"]["/v1/chat/completions"]["post"]
    assert generating["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatCompletionRequest")
    assert set(generating["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    statuses = {"400", "401", "408", "409", "411", "413", "415", "422", "429", "499", "502", "503", "504"}
    assert set(generating["responses"]) >= statuses
    assert document["paths"]["/health"]["get"]["security"] == []
    assert document["paths"]["/v1/workers"]["get"]["security"] == [{"bearer": []}, {"x-api-key": []}]


@pytest.mark.parametrize(("path", "body"), GENERATING)
async def test_answers_and_events_of_generating_endpoints_are_as_described(stack, path, body):
    (endpoint,) = (route.app.endpoint for route in stack.gateway._http._config.app.routes if route_path(route) == path)
    async with stack.client.post(stack.url + path, json={"model": "tiny", **body}) as answer:
        assert answer.status == 200, await answer.text()
        msgspec.json.decode(await answer.read(), type=endpoint.answer)
    streamed = {"model": "tiny", **body, "stream": True}
    if "completions" in path:
        streamed["stream_options"] = {"include_usage": True}
    async with stack.client.post(stack.url + path, json=streamed) as answer:
        assert answer.status == 200, await answer.text()
        shown = [event async for event in events(answer) if event != "[DONE]"]
    assert shown
    for event in shown:
        msgspec.convert(event, endpoint.event)


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize(("method", "path", "body", "kind"), OTHERS)
async def test_other_answers_are_as_described(stack, method, path, body, kind):
    async with stack.client.request(method, stack.url + path, json=body) as answer:
        msgspec.json.decode(await answer.read(), type=kind)


@pytest.mark.parametrize(
    ("path", "has_own_error"),
    [("/v1/chat/completions", True), ("/v1/completions", True), ("/generate", True), ("/v1/responses", False),
     ("/v1/messages", False)],
)  # fmt: skip
async def test_the_events_of_a_stream_are_described_as_text_with_json_in_it(stack, path, has_own_error):
    _, document = await stack.get("/openapi.json")
    event = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
    data = event["properties"]["data"]
    if has_own_error:
        data, done = data["anyOf"]
        assert done == {"const": "[DONE]"}
    assert data["contentMediaType"] == "application/json"
    assert ("#/components/schemas/Error" in refs(data)) == has_own_error


async def test_the_example_of_each_body_is_accepted(folder):
    async with running(folder, enable_priority_scheduling=True) as stack:
        await stack.pair()
        _, document = await stack.get("/openapi.json")
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if "requestBody" in operation:
                    body = operation["requestBody"]["content"]["application/json"]["example"]
                    async with stack.client.request(method, stack.url + path, json=body) as answer:
                        wanted = 404 if "{rid}" in path or "{name}" in path else 200
                        assert answer.status == wanted, (path, await answer.text())


async def test_a_stored_response_is_read_listed_and_deleted_as_described(stack):
    _, response = await stack.post("/v1/responses", {"input": "Hi", "max_output_tokens": 16})
    path = f"{stack.url}/v1/responses/{response['id']}"
    async with stack.client.get(path) as answer:
        msgspec.json.decode(await answer.read(), type=generated.Response)
    async with stack.client.get(path + "/input_items") as answer:
        msgspec.json.decode(await answer.read(), type=answers.InputItemList)
    async with stack.client.delete(path) as answer:
        msgspec.json.decode(await answer.read(), type=answers.ResponseDeleted)


def test_types_of_answers_refuse_unknown_fields():
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps({"status": "ok", "more": 1}), type=answers.Health)
    assert issubclass(generated.Completion, generated.Answer)
