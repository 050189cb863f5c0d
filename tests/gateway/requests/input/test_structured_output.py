"""A request may ask for structured output in one way only."""

import pytest

from common.errors import RequestError
from gateway.http.protocol.openai import ChatCompletionRequest, ChatMessage, JsonSchemaField, ResponseFormat
from gateway.requests.input.structured_output import StructuredOutput, only_one, structured_output_of


def test_two_ways_at_once_are_refused() -> None:
    first, second = StructuredOutput("regex", "regex", "a"), StructuredOutput("ebnf", "grammar", "b")
    assert only_one([]) is None
    assert only_one([first]) is first
    with pytest.raises(RequestError, match="ebnf: cannot be combined with regex"):
        only_one([first, second])


@pytest.mark.parametrize(("strict", "is_lenient"), [(None, True), (False, True), (True, False)])
def test_a_schema_is_followed_as_far_as_it_can_be_unless_it_is_strict(strict, is_lenient):
    """As in OpenAI's API, where ``strict`` is false by default."""
    response_format = ResponseFormat(type="json_schema", json_schema=JsonSchemaField(schema={}, strict=strict))
    body = ChatCompletionRequest(messages=[ChatMessage(role="user", content="Hi")], response_format=response_format)
    wanted = structured_output_of(body)
    assert wanted is not None
    assert wanted.is_lenient == is_lenient


@pytest.mark.parametrize("name", ["schema", "value"])
def test_a_schema_of_a_json_object_is_never_strict(name):
    response_format = ResponseFormat(type="json_object", **{name: {}})
    body = ChatCompletionRequest(messages=[ChatMessage(role="user", content="Hi")], response_format=response_format)
    assert structured_output_of(body) == StructuredOutput(f"response_format.{name}", "json_schema", {}, is_lenient=True)


def test_one_grammar_may_have_two_names() -> None:
    first, second = (StructuredOutput(param, "grammar", 'start: "a"') for param in ("guided_grammar", "grammar"))
    assert only_one([first, second]) is first
    third = StructuredOutput("regex", "regex", 'start: "a"')
    with pytest.raises(RequestError, match="regex: cannot be combined with guided_grammar"):
        only_one([first, second, third])
