"""A request may ask for structured output in one way only."""

import pytest

from common.errors import RequestError
from gateway.requests.input.structured_output import StructuredOutput, only_one


def test_two_ways_at_once_are_refused() -> None:
    first, second = StructuredOutput("regex", "regex", "a"), StructuredOutput("ebnf", "grammar", "b")
    assert only_one([]) is None
    assert only_one([first]) is first
    with pytest.raises(RequestError, match="ebnf: cannot be combined with regex"):
        only_one([first, second])


def test_one_grammar_may_have_two_names() -> None:
    first, second = (StructuredOutput(param, "grammar", 'start: "a"') for param in ("guided_grammar", "grammar"))
    assert only_one([first, second]) is first
    third = StructuredOutput("regex", "regex", 'start: "a"')
    with pytest.raises(RequestError, match="regex: cannot be combined with guided_grammar"):
        only_one([first, second, third])
