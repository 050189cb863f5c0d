"""Every way of asking for structured output becomes a grammar that accepts exactly what it should."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from support.gateway.fake_nodes import EOS, make_tokenizer

from common.errors import RequestError
from gateway.requests.input.grammars.compiler import to_lark
from gateway.requests.input.grammars.structural_tags import WHITESPACE
from gateway.requests.input.structured_output import Kind, StructuredOutput

PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<fn="],
    "tags": [
        {"begin": "<fn=a>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</fn>"},
        {"begin": "<fn=b>", "content": {"type": "any_text"}, "end": "</fn>"},
    ],
}
OLDER = {
    "type": "structural_tag",
    "structures": [{"begin": "<fn=a>", "schema": PERSON, "end": "</fn>"}],
    "triggers": ["<fn="],
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    plain = make_tokenizer()
    return LLTokenizer(plain.to_str(), eos_token=[plain.token_to_id(EOS)])


def accepts(tokenizer: LLTokenizer, kind: Kind, value: Any, text: str) -> bool:
    matcher = LLMatcher(tokenizer, to_lark(StructuredOutput("field", kind, value)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        ("json_object", None, ['{"a": [1, null]}', "{}"], ["[]", "1", '{"a"}']),
        ("json_schema", PERSON, ['{"age": 3}', '{\n "age":3}'], ["{}", '{"age": "3"}']),
        ("json_schema", json.dumps(PERSON), ['{"age": 3}'], ["{}"]),
        ("json_schema", True, ["{}", "3"], ["x"]),
        ("json_schema", {"type": "integer", "minimum": -(2**62), "maximum": 2**63 - 1}, ["-9", "12"], ["x"]),
        ("json_schema", {"type": "integer", "minimum": 2**60, "maximum": 2**60}, [str(2**60)], [str(2**60 + 1)]),
        ("json_schema", {"const": 2**63 - 1}, [str(2**63 - 1)], [str(2**63)]),
        ("json_schema", {"type": "integer", "default": -(2**63)}, ["-9"], ["x"]),
        ("json_schema", {"type": "integer", "exclusiveMaximum": 2**53 + 2}, [str(2**53)], [str(2**53 + 2)]),
        ("json_schema", {"type": "integer", "exclusiveMinimum": -(2**53) - 2}, [str(-(2**53))], [str(-(2**53) - 2)]),
        ("json_schema", {"type": ["number", "null"], "minimum": 2**53 + 1}, ["9007199254740999", "null"], ["1"]),
        ("json_schema", {"properties": {"const": {"type": "integer", "minimum": -(2**53) - 1}}}, ["{}"], ["x"]),
        ("json_schema", {"type": "string", "enum": ["é", "🙂"]}, ['"é"', '"🙂"'], ['"e"']),
        ("regex", r"\d{2}/[a-z]+", ["12/ab"], ["1/ab", "12/"]),
        ("regex", "^ab$", ["ab"], ["b", "abb"]),
        ("regex", 'a\n"b"', ['a\n"b"'], ["a"]),
        ("choice", ["yes", "no", "no way", 'say "é🙂"\n'], ["no", "no way", 'say "é🙂"\n'], ["n", "yes no", ""]),
        ("grammar", 'root ::= greeting " " [a-z]+\ngreeting ::= "hi" | "ho"\n', ["hi you", "ho x"], ["hi", "he x"]),
        ("grammar", 'start: "hi" NAME\nNAME: /[a-z]+/', ["hiyou"], ["hi"]),
        ("grammar", '?start: "hi" name\n?name: /[a-z]+/', ["hiyou"], ["hi"]),
        ("lark", 'start: "x" | %json {"type": "integer"}', ["x", "12"], ["y"]),
        ("structural_tag", OLDER, ["hi", 'x<fn=a>{"age":1}</fn>y<fn=a>{"age":2}</fn>'], ["<fn=b>", "<fn=a>{}</fn>"]),
        ("structural_tag", {"format": CALLS}, ["", 'x<fn=b>any</fn>y<fn=a>{"age":1}</fn>'], ["x<fn=c>", "<fn=b>any"]),
        ("structural_tag", {"format": {**CALLS, "at_least_one": True}}, ["<fn=b>any</fn>and <fn=b></fn>"], ["", "x"]),
        ("structural_tag", {"format": {**CALLS, "stop_after_first": True}}, ["hi", "x<fn=b>z</fn>"], ["<fn=b>z</fn>y"]),
        (
            "structural_tag",
            {"format": {"type": "sequence", "elements": [
                {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                {"type": "or", "elements": [
                    {"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "b+"}]},
                {"type": "any_text"},
            ]}},
            ["<t>so</t>a", "<t></t>bb and more"],
            ["a", "<t>so</t>c", "<t>so"],
        ),
        (
            "structural_tag",
            {"format": {"type": "tags_with_separator", "separator": ", ", "at_least_one": True, "tags": [
                {"begin": "(", "content": {"type": "regex", "pattern": "[0-9]"}, "end": ")"}]}},
            ["(1)", "(1), (2)"],
            ["", "(1)(2)", "(1), "],
        ),
    ],
)  # fmt: skip
def test_a_grammar_accepts_what_it_should(
    tokenizer: LLTokenizer, kind: Kind, value: Any, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(tokenizer, kind, value, text)] == []
    assert [text for text in bad if accepts(tokenizer, kind, value, text)] == []


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5))
def test_each_choice_is_accepted_whatever_its_characters(tokenizer: LLTokenizer, choices: list[str]) -> None:
    assert all(accepts(tokenizer, "choice", choices, choice) for choice in choices)


def test_ten_thousand_choices_can_be_followed(tokenizer: LLTokenizer) -> None:
    choices = [f"choice {i}" for i in range(10_000)]
    assert accepts(tokenizer, "choice", choices, "choice 9999")
    assert not accepts(tokenizer, "choice", choices, "choice 10000")


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("kind", "value", "param", "words"),
    [
        ("json_schema", {"properties": {"a": {"type": "foo"}}}, "field.properties.a", "Invalid type: foo"),
        (
            "json_schema",
            {
                "$defs": {"n": {"items": {"type": "string", "pattern": "(?=a)b"}}},
                "properties": {"b": {"$ref": "#/$defs/n"}},
            },
            "field.$defs.n.items",
            "look-around",
        ),
        ("json_schema", {"items": {"not": {"type": "string"}}}, "field.items", 'Unimplemented keys: ["not"]'),
        ("json_schema", {"$ref": "#/$defs/x"}, "field", "does not exist"),
        ("json_schema", {"minimum": "a" * 97 + "\u20ac"}, "field", "cannot be compiled"),  # at which the library panics
        ("json_schema", '{"type": ', "field", "is not valid JSON"),
        ("json_schema", {"properties": {"a": {"const": -(2**63)}}}, "field.properties.a", "const -9223372036854775808"),
        ("json_schema", {"properties": {"a": {"enum": [2**60 + 1]}}}, "field.properties.a", "integers up to 2**53"),
        ("json_schema", {"anyOf": [{"type": "integer", "minimum": 2**53 + 1}]}, "field.anyOf[0]", "minimum"),
        ("json_schema", {"type": "integer", "minimum": -1e300, "maximum": -1e300}, "field", "maximum -1e+300"),
        ("json_schema", {"const": 10**400}, "field", "const of more than 30 digits"),
        ("lark", 'start: x\nx: %json // y\n {"type":"integer","maximum":-1e19,"minimum":-1e19}', "field", "-1e+19"),
        (
            "json_schema",
            {"allOf": [{"type": "number", "maximum": 1 - 2**63}, {"minimum": 1 - 2**63}]},
            "field.allOf[0]",
            "maximum -92",
        ),
        (
            "json_schema",
            {"a": {"properties": {"type": "integer", "maximum": -1e19}}, "$ref": "#/a/properties"},
            "field",
            "1e",
        ),
        ("json_schema", {"type": "integer", "exclusiveMinimum": 2**53}, "field", "exclusiveMinimum 9007199254740992"),
        ("json_schema", {"type": "integer", "exclusiveMaximum": 2**55}, "field", "exclusiveMaximum 36028797018963968"),
        ("json_schema", {"type": "integer", "exclusiveMaximum": 2**63 - 1}, "field", "exclusiveMaximum 92"),
        ("json_schema", {"const": 2**63}, "field", "const 9223372036854775808"),
        ("lark", 'start: "%json //" %json {"type": "integer", "maximum": -1e19} x\nx: "a"', "field", "-1e+19"),
        ("lark", 'start: "%json [" x\nx: %json {"const": -9223372036854775808}', "field", "-9.223372036854776e+18"),
        ("json_schema", r'{"$defs": {"a": "\ud800"}, "properties": {"\ud801": {}}}', "field", "is not valid JSON"),
        ("structural_tag", r'{"format": {"type": "regex", "pattern": "\ud800"}}', "field", "is not valid JSON"),
        (
            "structural_tag",
            {**OLDER, "structures": [{"begin": "<fn=", "schema": r'{"properties": {"\ud800": {}}}'}]},
            "field.structures[0].schema",
            "is not valid JSON",
        ),
        ("json_schema", [1], "field", "must be a JSON schema"),
        ("json_schema", False, "field", "must be a JSON schema"),
        ("regex", "a(b", "field", "unclosed group"),
        ("regex", "", "field", "must be a text that is not empty"),
        ("grammar", "root ::= foo", "field", "Rule 'foo' not found"),
        ("grammar", 'root = "a"', "field", "line 1"),
        ("grammar", "\n" * (24 << 10), "field", "No 'root' rule found"),
        ("grammar", "start: A\n" * (3 << 10), "field", "has 27648 bytes, at most 24576 are allowed"),
        ("grammar", 'root ::= start\nstart ::= "a"', "field", "Rule 'start' already exists"),
        ("grammar", 'start: "a" b', "field", 'at 1(8): unknown name: "b"'),
        ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "field", "nested too deeply"),
        ("lark", "start: (", "field", "cannot be compiled"),
        ("choice", [1], "field", "must be a list of texts"),
        ("structural_tag", {"type": "structural_tag"}, "field", "needs a format"),
        ("structural_tag", {"format": {"type": "dance"}}, "field.format.type", "'dance' is not supported"),
        ("structural_tag", {**OLDER, "triggers": ["<x"]}, "field.structures[0].begin", "none of the triggers"),
    ],
)
def test_an_error_names_the_field_and_the_place(kind: Kind, value: Any, param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_lark(StructuredOutput("field", kind, value))
    assert caught.value.status == 400
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.message.startswith(f"{param}: ")


def test_the_place_of_an_error_is_sought_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.requests.input.grammars.compiler.PLACE_S", 0.0)
    with pytest.raises(RequestError, match="field: cannot be compiled: Invalid type: foo"):
        to_lark(StructuredOutput("field", "json_schema", {"properties": {"a": {"type": "foo"}}}))


def test_names_of_properties_may_be_asked_to_be_strings() -> None:
    record = {"type": "object", "additionalProperties": {"type": "number"}}
    asked = {**record, "propertyNames": {"type": "string", "title": "Record"}}  # as LangChain writes it in JavaScript
    for around in (
        lambda schema: schema,
        lambda schema: {"properties": {"propertyNames": {"type": "string"}, "a": schema}},
        lambda schema: {"items": {"anyOf": [schema, {"enum": [{"propertyNames": {"type": "string"}}]}]}},
    ):
        lark = to_lark(StructuredOutput("field", "json_schema", around(asked)))
        assert lark == to_lark(StructuredOutput("field", "json_schema", around(record)))
    with pytest.raises(RequestError, match=r'field: cannot be compiled: Unimplemented keys: \["propertyNames"\]'):
        to_lark(StructuredOutput("field", "json_schema", {**record, "propertyNames": {"maxLength": 3}}))


def test_patterns_with_look_around_are_ignored_in_a_schema_that_is_not_strict() -> None:
    """Pydantic writes this one for decimals."""
    decimal = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}
    schema = {"type": "object", "properties": {"price": decimal}}
    with pytest.raises(RequestError, match="look-around"):
        to_lark(StructuredOutput("field", "json_schema", schema))
    assert "(?!" not in to_lark(StructuredOutput("field", "json_schema", schema, is_lenient=True))


def test_a_long_regular_expression_is_refused() -> None:
    with pytest.raises(RequestError, match="field: has 20000 bytes, at most 16384 are allowed"):
        to_lark(StructuredOutput("field", "regex", "(ab)?" * 4_000))


def test_json_in_structural_tags_has_bounded_whitespace_too():
    content = {"type": "json_schema", "json_schema": {"type": "object"}}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
    assert f'"whitespace_pattern": {json.dumps(WHITESPACE)}' in to_lark(StructuredOutput("tag", "structural_tag", tag))


def test_a_schema_may_say_itself_where_whitespace_is_allowed():
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    assert "whitespace_pattern" not in to_lark(StructuredOutput("schema", "json_schema", schema))
