"""Anthropic's own Python client against a whole service: messages, streams, counts, structured outputs, errors."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel
from support.service.service import Service, running

QUESTION: Any = [{"role": "user", "content": "Speak, Romeo."}]
OPTIONS: Any = {"model": "m", "messages": QUESTION, "max_tokens": 12, "extra_body": {"temperature": 0}}


TOOL: Any = {
    "name": "exeunt",
    "description": "The actors leave the stage.",
    "input_schema": {
        "type": "object",
        "properties": {"actors": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["actors"],
        "additionalProperties": False,
    },
}


class Verse(BaseModel):
    mood: Literal["glad", "sad"]
    is_rhymed: bool


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = {"sse_ping_interval": 0.005}  # so that the client must skip many comments
    with running(tmp_path_factory.mktemp("anthropic-client"), gateway_options=options) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=service.url, api_key="any", max_retries=0, timeout=100) as client:
        yield client


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_and_its_stream(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**OPTIONS, system="In verse.")
    assert text_of(whole)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with client.messages.stream(**OPTIONS, system="In verse.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.id != whole.id


def test_the_tool_runner_goes_on_without_conversations_on_the_server(client: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def exeunt(actors: Literal["one", "all"]) -> str:
        """The actors leave the stage.

        Args:
            actors: who leaves
        """
        return f"{actors} left"

    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    runner = client.beta.messages.tool_runner(
        model="m", messages=QUESTION, max_tokens=200, tools=[exeunt], tool_choice=choice, max_iterations=2
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]


async def test_many_requests_of_the_asynchronous_client(service: Service) -> None:
    async with anthropic.AsyncAnthropic(base_url=service.url, api_key="any") as client:

        async def answer(number: int) -> str:
            options = {**OPTIONS, "messages": [{"role": "user", "content": f"Number {number}."}]}
            return text_of(await client.messages.create(**options))

        async def stream(number: int) -> str:
            options = {**OPTIONS, "messages": [{"role": "user", "content": f"Number {number}."}]}
            async with client.messages.stream(**options) as events:
                return "".join([text async for text in events.text_stream])

        numbers = range(6)
        whole = await asyncio.gather(*map(answer, numbers))
        assert await asyncio.gather(*map(stream, numbers)) == whole
        assert all(whole)


def test_tokens_are_counted_as_a_message_uses_them(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="m", messages=QUESTION, system="In verse.")
    usage = client.messages.create(**OPTIONS, system="In verse.").usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    again = client.messages.create(**OPTIONS, system="In verse.").usage
    assert again.cache_read_input_tokens


def test_a_prompt_is_cached_without_output(client: anthropic.Anthropic) -> None:
    options = {**OPTIONS, "messages": [{"role": "user", "content": "A speech that is long enough to be cached. " * 9}]}
    empty = client.messages.create(**{**options, "max_tokens": 0})
    assert (empty.content, empty.stop_reason, empty.usage.output_tokens) == ([], "max_tokens", 0)
    cached = client.messages.create(**options).usage.cache_read_input_tokens or 0
    assert cached > (empty.usage.cache_read_input_tokens or 0)


def test_a_stop_sequence_ends_the_message(client: anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(**OPTIONS))
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    message = client.messages.create(**OPTIONS, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]


def test_a_message_of_the_assistant_is_continued(client: anthropic.Anthropic) -> None:
    options = {**OPTIONS, "messages": [*QUESTION, {"role": "assistant", "content": "O, speak"}]}
    counted = client.messages.count_tokens(model="m", messages=options["messages"])
    message = client.messages.create(**options)
    assert text_of(message)
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_message_that_must_call_a_tool_and_its_result(client: anthropic.Anthropic) -> None:
    options = {**OPTIONS, "max_tokens": 200, "tools": [TOOL]}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    message = client.messages.create(**options, tool_choice=choice)
    (call,) = message.content
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "exeunt")
    assert call.input["actors"] in range(10)
    with client.messages.stream(**options, tool_choice=choice) as stream:
        final = stream.get_final_message()
    assert [(block.type, block.input) for block in final.content] == [("tool_use", call.input)]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "They are gone."}]}
    turns = [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    none: Any = {"type": "none"}
    assert text_of(client.messages.create(**{**options, "messages": turns}, tool_choice=none))


def test_parsed_structured_outputs(client: anthropic.Anthropic) -> None:
    message = client.messages.parse(model="m", messages=QUESTION, max_tokens=400, output_format=Verse)
    assert isinstance(message.parsed_output, Verse)
    assert message.stop_reason == "end_turn"


def test_errors_have_their_types(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**OPTIONS, "model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**{**OPTIONS, "messages": [{"role": "user", "content": "word " * 9000}]})
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="only text is"):
        client.messages.create(**{**OPTIONS, "messages": [{"role": "user", "content": [image]}]})
    server_tool: Any = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError, match="only tools with an input_schema are"):
        client.messages.create(**OPTIONS, tools=[server_tool])
