"""OpenAI's own Python client against a whole service: chats, responses, structured outputs, errors, retries."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from support.service.service import Service, running
from support.waiting import until

QUESTION = [{"role": "user", "content": "Speak, Romeo."}]


FUNCTION: Any = {
    "name": "exeunt",
    "description": "The actors leave the stage.",
    "parameters": {
        "type": "object",
        "properties": {"actors": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["actors"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Verse(BaseModel):
    mood: Literal["glad", "sad"]
    is_rhymed: bool


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = {"sse_ping_interval": 0.005}  # so that the client must skip many comments
    with running(tmp_path_factory.mktemp("openai-client"), gateway_options=options) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with client_of(service) as client:
        yield client


def client_of(service: Service, max_retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=max_retries, timeout=100)


# ---- chats and completions -------------------------------------------------------------------------------------------


def test_a_chat_and_its_stream(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**options)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    *chunks, last = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt=["ROMEO:", "JULIET:"], max_tokens=5, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.text for choice in answer.choices)


async def test_many_requests_of_the_asynchronous_client(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="any") as client:

        async def respond(number: int) -> str:
            request = client.responses.create(model="m", input=f"Number {number}.", max_output_tokens=6, temperature=0)
            return (await request).output_text

        async def stream(number: int) -> str:
            events = await client.responses.create(
                model="m", input=f"Number {number}.", max_output_tokens=6, temperature=0, stream=True
            )
            return "".join([event.delta async for event in events if event.type == "response.output_text.delta"])

        numbers = range(6)
        whole = await asyncio.gather(*map(respond, numbers))
        assert await asyncio.gather(*map(stream, numbers)) == whole
        assert all(whole)


def test_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]


# ---- responses -------------------------------------------------------------------------------------------------------


def test_a_response_and_the_helper_for_streams(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "input": "Speak, Romeo.", "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**options, instructions="In verse.")
    assert whole.output_text
    assert (whole.status, whole.usage is not None and whole.usage.output_tokens) == ("incomplete", 12)
    with client.responses.stream(**options, instructions="In verse.") as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"
    with client.responses.stream(**options, instructions="In verse.", text={"format": {"type": "text"}}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_a_conversation_is_continued_read_and_deleted(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(**options, input="Speak, Romeo.", metadata={"part": "one"})
    second = client.responses.create(**options, input="Go on.", previous_response_id=first.id)
    by_hand: Any = [
        {"role": "user", "content": "Speak, Romeo."}, *first.output, {"role": "user", "content": "Go on."},
    ]  # fmt: skip
    same = client.responses.create(**options, input=by_hand, store=False)
    assert second.output_text == same.output_text
    assert second.usage is not None and same.usage is not None
    assert second.usage.input_tokens == same.usage.input_tokens
    read = client.responses.retrieve(first.id)
    assert (read.output_text, read.metadata) == (first.output_text, {"part": "one"})
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**options, input="Go on.", previous_response_id=first.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


# ---- tools and structured outputs ------------------------------------------------------------------------------------


def test_a_chat_that_must_call_a_tool(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "messages": QUESTION, "temperature": 0, "max_tokens": 200}
    options |= {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
    options["parallel_tool_calls"] = False
    (choice,) = client.chat.completions.create(**options).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.name == "exeunt"
    assert json.loads(call.function.arguments)["actors"] in range(10)
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_a_response_that_must_call_a_tool_and_its_result(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "temperature": 0, "max_output_tokens": 200, "parallel_tool_calls": False}
    options["tools"] = [{"type": "function", **FUNCTION}]
    choice: Any = {"type": "function", "name": "exeunt"}
    first = client.responses.create(**options, input="Leave the stage.", tool_choice=choice)
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["actors"] in range(10)
    with client.responses.stream(**options, input="Leave the stage.", tool_choice=choice) as stream:
        arguments = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == call.arguments
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "They are gone."}]
    second = client.responses.create(**options, input=result, previous_response_id=first.id, tool_choice="none")
    assert second.output_text


def test_parsed_structured_outputs(client: openai.OpenAI) -> None:
    messages: Any = QUESTION
    chat = client.chat.completions.parse(model="m", messages=messages, response_format=Verse, max_tokens=400)
    assert isinstance(chat.choices[0].message.parsed, Verse)
    response = client.responses.parse(model="m", input="Speak, Romeo.", text_format=Verse, max_output_tokens=400)
    assert isinstance(response.output_parsed, Verse)
    assert response.status == "completed"


# ---- errors and retries ----------------------------------------------------------------------------------------------


def test_errors_have_their_types_and_codes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="other", input="Hi")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model="m", input="word " * 9000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError) as background:
        client.responses.create(model="m", input="Hi", background=True)
    assert (background.value.code, background.value.param) == ("not_supported", "background")
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings is not supported"):
        client.embeddings.create(model="m", input="Hi")


def test_a_request_is_retried_until_there_are_nodes(tmp_path: Path) -> None:
    service = Service(tmp_path / "logs")
    try:
        service.start("gateway")
        service.wait_until_ready()
        with client_of(service) as client, pytest.raises(openai.InternalServerError) as refused:
            client.responses.create(model="m", input="Hi")
        assert refused.value.status_code == 503
        before = num_refusals(service, "no_route")

        def start_nodes() -> None:
            wait_for_refusal(service, before, "no_route")
            service.start(*service.nodes)

        with client_of(service, max_retries=50) as client:
            starting = threading.Thread(target=start_nodes)
            starting.start()
            raw = client.responses.with_raw_response.create(model="m", input="Hi", max_output_tokens=4)
            starting.join()
        assert raw.retries_taken > 0
        assert raw.parse().output_text
    finally:
        service.close()


@pytest.mark.slow
def test_a_request_is_retried_when_the_service_is_full(tmp_path: Path) -> None:
    options = {"max_running_requests": 1}
    with running(tmp_path / "logs", node_options=options, gateway_options={"max_queued_requests": 0}) as service:
        with client_of(service) as client:
            extra = {"ignore_eos": True}
            long = client.responses.create(model="m", input="Hi", max_output_tokens=3000, stream=True, extra_body=extra)
            next(iter(long))
            with pytest.raises(openai.RateLimitError) as refused:
                client.responses.create(model="m", input="Hi", max_output_tokens=4)
            assert refused.value.code == "queue_full"
            assert int(refused.value.response.headers["retry-after"]) > 0
            before = num_refusals(service, "queue_full")
            closing = threading.Thread(target=lambda: (wait_for_refusal(service, before, "queue_full"), long.close()))
            closing.start()
            with client_of(service, max_retries=50) as patient:
                raw = patient.responses.with_raw_response.create(model="m", input="Hi", max_output_tokens=4)
            closing.join()
            assert raw.retries_taken > 0
            assert raw.parse().output_text


def num_refusals(service: Service, reason: str) -> float:
    """The gateway's count of refusals for this reason."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    found = [line for line in lines if line.startswith("baton_rejections_total{") and f'reason="{reason}"' in line]
    return sum(float(line.split()[-1]) for line in found)


def wait_for_refusal(service: Service, before: float, reason: str) -> None:
    until(lambda: num_refusals(service, reason) > before, timeout_s=120)
