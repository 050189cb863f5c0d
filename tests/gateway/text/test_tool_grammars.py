"""Grammars of tool calls, driven by llguidance: they accept calls that the parser reads, and nothing else."""

import dataclasses
import json
import random
import re

import llguidance
import llguidance.numpy
import numpy
import pytest
from support.gateway.outputs import TOOLS, WEATHER, calls, cut, parse, rendered, texts

from common.errors import RequestError
from gateway.requests.input.chat_output import answer_rule, calls_or_answer
from gateway.requests.input.grammars.compiler import to_lark
from gateway.requests.input.structured_output import StructuredOutput
from gateway.text.output_parser import RequiredCallsParser, Tool
from gateway.text.tool_parsers.registry import FORMATS

EOS = 256
FIRST_MARKER = 257
PARIS = ("get_weather", {"city": "Paris"})
UTC = ("get_time", {"zone": "UTC"})
#: Formats whose calls may follow text.
AFTER_TEXT = [name for name in FORMATS if name not in ("llama3-json", "pythonic", "gpt-oss")]
#: Whether the tokenizer has tokens for the markers. gpt-oss always has.
NAMES_AND_TOKENS = [(name, are_tokens) for name in FORMATS for are_tokens in (True, False) if name != "gpt-oss"]
NAMES_AND_TOKENS.append(("gpt-oss", True))

both = pytest.mark.parametrize(("name", "are_tokens"), NAMES_AND_TOKENS)


class _ByteTokenizer:
    """One token for each byte, and one for each marker."""

    eos_token_id = EOS
    bos_token_id = None

    def __init__(self, markers):
        self.tokens = [bytes([i]) for i in range(256)] + [b"<|eos|>"] + [marker.encode() for marker in markers]
        self.special_token_ids = [EOS, *range(FIRST_MARKER, len(self.tokens))]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


def markers_of(name, are_tokens):
    return FORMATS[name].markers if are_tokens else ()


def ids_of(markers):
    return {marker: FIRST_MARKER + i for i, marker in enumerate(markers)}


def matcher_of(name, are_tokens, *, tools=TOOLS, parallel=True, required=True):
    markers = markers_of(name, are_tokens)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokenizer(markers)))
    grammar = FORMATS[name].grammar(tools, parallel=parallel, required=required, token_ids=ids_of(markers))
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    assert llguidance.LLMatcher.validate_grammar(grammar, tokenizer) == ""
    return matcher


def accepts(name, are_tokens, text, **options):
    """Whether an output may consist of this text."""
    return is_consumed(matcher_of(name, are_tokens, **options), markers_of(name, are_tokens), text)


def follows(grammar, markers, text):
    """Whether an output of this text follows a grammar."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokenizer(markers)))
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return is_consumed(matcher, markers, text)


def is_consumed(matcher, markers, text):
    parts = re.split("(" + "|".join(map(re.escape, markers)) + ")", text) if markers else [text]
    ids = []
    for part in parts:
        ids += [FIRST_MARKER + markers.index(part)] if part in markers else list(part.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@both
def test_a_required_call_is_a_valid_call(name, are_tokens):
    call = rendered(name, [PARIS])
    assert accepts(name, are_tokens, call)
    assert accepts(name, are_tokens, rendered(name, [("get_weather", {"city": "A", "days": 3})]))
    assert accepts(name, are_tokens, rendered(name, [UTC]))
    assert not accepts(name, are_tokens, "")
    assert not accepts(name, are_tokens, "Hello")
    assert not accepts(name, are_tokens, call.replace("get_weather", "get_money"))
    assert not accepts(name, are_tokens, call.replace("city", "town"))
    assert not accepts(name, are_tokens, rendered(name, [("get_weather", {"city": "A", "days": "many"})]))
    assert not accepts(name, are_tokens, rendered(name, [("get_weather", {"days": 3})]))
    assert not accepts(name, are_tokens, call[:-2])


@both
def test_a_named_choice_is_a_grammar_of_one_tool(name, are_tokens):
    assert accepts(name, are_tokens, rendered(name, [PARIS]), tools=(WEATHER,))
    assert not accepts(name, are_tokens, rendered(name, [UTC]), tools=(WEATHER,))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("required", [True, None, "city", [1]])
def test_a_required_that_is_no_list_of_names_is_no_failure_of_ours(name, required):
    inner = {"type": "object", "properties": {"b": {"type": "string"}}, "required": required}
    tool = Tool("f", "", {"type": "object", "properties": {"a": inner}, "required": required})
    assert FORMATS[name].grammar([tool], parallel=True, required=True, token_ids={})


def test_definitions_stand_only_with_parameters_that_refer_to_them():
    parameters = {
        "type": "object",
        "$defs": {"Day": {"type": "object", "properties": {"month": {"type": "integer"}}}},
        "properties": {
            "days": {"type": "array", "items": {"$ref": "#/$defs/Day"}},
            "nights": {"type": "integer"},
            "rooms": {"type": "integer"},
        },
    }
    grammar = FORMATS["qwen3-coder"].grammar([Tool("f", "", parameters)], parallel=True, required=True, token_ids={})
    assert grammar.count('"month"') == 1


@pytest.mark.parametrize("line", ["</function>", "<parameter=city>"])
def test_no_value_of_qwen3_coder_has_a_line_that_would_end_it(line):
    for city, is_allowed in ((f"a {line}", True), (f"a\n{line}", False)):
        call = rendered("qwen3-coder", [("get_weather", {"city": city})])
        assert accepts("qwen3-coder", True, call) is is_allowed


REFERRING = Tool(
    "f",
    "",
    {
        "type": "object",
        "$defs": {
            "Day": {"type": "object", "properties": {"month": {"type": "integer"}}, "additionalProperties": False},
            "Alias": {"$ref": "#/$defs/Day"},
            "Mood": {"enum": ["glad", "grave"]},
            "Text": {"type": "string"},
            "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
        },
        "properties": {
            "day": {"$ref": "#/$defs/Alias"},
            "end": {"anyOf": [{"$ref": "#/$defs/Day"}, {"type": "null"}]},
            "mood": {"$ref": "#/$defs/Mood"},
            "text": {"$ref": "#/$defs/Text"},
            "loop": {"$ref": "#/$defs/Loop"},
            "lost": {"$ref": "#/$defs/Nothing"},
            # As zod-to-json-schema refers to a schema that it has written before.
            "days": {"type": "array", "items": {"$ref": "#/properties/end/anyOf/0"}},
            "other": {"$ref": "#/properties/text"},
        },
    },
)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("day", '{"month": 3}', "March"),
        ("day", '{"month": 3}', '{"month": "March"}'),
        ("end", "null", "soon"),
        ("mood", "grave", "cross"),
        ("text", '{"month": 3}', None),
        ("loop", "1", None),
        ("lost", "anything", None),
        ("days", '[{"month": 3}]', '[{"month": "March"}]'),
        ("other", "3", None),
    ],
)
def test_a_parameter_that_is_a_reference_is_bound_by_its_definition(name, good, bad):
    def accepted(value):
        call = f"<tool_call>\n<function=f>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        return accepts("qwen3-coder", True, call, tools=(REFERRING,))

    assert accepted(good)
    assert bad is None or not accepted(bad)


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_reference_to_the_whole_schema_means_that_of_the_tool(is_strict):
    """As zod refers to a schema that contains itself."""
    node = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"size": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["size", "children"],
        "additionalProperties": False,
    }

    def accepted(value):
        parameters = f"<parameter=size>\n1\n</parameter>\n<parameter=children>\n{value}\n</parameter>\n"
        call = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
        return accepts("qwen3-coder", True, call, tools=(Tool("f", "", node, is_strict),))

    assert accepted('[{"size": 2, "children": [{"size": 3, "children": []}]}]')
    assert not accepted("[[]]")


def test_definitions_that_many_parameters_refer_to_are_refused():
    parameters = {
        "type": "object",
        "$defs": {"Word": {"enum": ["x" * 1000]}},
        "properties": {f"p{i}": {"type": "integer", "not": {"$ref": "#/$defs/Word"}} for i in range(300)},
    }
    with pytest.raises(RequestError, match=r"^tools: the \$defs of f, .* have 3\d{5} bytes, at most 262144"):
        FORMATS["qwen3-coder"].grammar([Tool("f", "", parameters)], parallel=True, required=True, token_ids={})


@pytest.mark.parametrize(
    ("model_format", "name"),
    [
        *[("pythonic", name) for name in ("$filter", "a b", "a=", "")],
        *[("qwen3-coder", name) for name in ("a>b", " a", "a\nb", "a\n", "")],
    ],
)
def test_a_property_whose_name_cannot_be_read_is_refused_in_an_enforced_call(model_format, name):
    tool = Tool("find", "", {"type": "object", "properties": {"a-b.ü": {"type": "string"}, name: {"type": "string"}}})
    with pytest.raises(RequestError, match=re.escape(f"tools: find cannot be called with its property {name!r}")):
        FORMATS[model_format].grammar([tool], parallel=True, required=True, token_ids={})
    assert FORMATS[model_format].grammar([tool], parallel=True, required=False, token_ids={})


@both
def test_a_required_call_has_no_arguments_that_the_tool_does_not_declare(name, are_tokens):
    assert not accepts(name, are_tokens, rendered(name, [("get_time", {"zone": "UTC", "town": "Paris"})]))


def test_tools_can_allow_arguments_that_they_do_not_declare():
    call = rendered("hermes", [("any", {"a": 1, "b": 2})])
    for more in ({"additionalProperties": True}, {"patternProperties": {"^[a-z]$": {"type": "integer"}}}):
        tool = Tool("any", "", {"type": "object", "properties": {"a": {"type": "integer"}}, **more})
        assert accepts("hermes", True, call, tools=(tool,))


def test_a_tool_may_require_an_argument_that_it_does_not_declare():
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]})
    assert accepts("hermes", True, rendered("hermes", [("f", {"a": 1, "b": 2})]), tools=(tool,))
    assert not accepts("hermes", True, rendered("hermes", [("f", {"a": 1})]), tools=(tool,))


def test_a_pattern_with_look_around_binds_no_tool_that_is_not_strict():
    """Zod writes such patterns for e-mail addresses."""
    address = {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+\.[a-z]{2,}$"}
    letter = {"type": "string", "pattern": "^[ab]$"}
    tool = Tool("send", "", {"type": "object", "properties": {"to": address, "pattern": letter}})

    def problem(tool):
        grammar = FORMATS["hermes"].grammar([tool], parallel=True, required=True, token_ids={})
        return llguidance.LLMatcher.validate_grammar(grammar, None)

    def accepted(**arguments):
        return accepts("hermes", True, rendered("hermes", [("send", arguments)]), tools=(tool,))

    assert problem(tool) == ""
    assert accepted(to="a@b.cc", pattern="a")
    assert not accepted(to="a@b.cc", pattern="c")
    assert "look-around" in problem(dataclasses.replace(tool, is_strict=True))


@both
def test_several_calls_only_if_they_may_be_parallel(name, are_tokens):
    two = rendered(name, [PARIS, UTC])
    assert accepts(name, are_tokens, two) is (name != "gpt-oss")  # a call ends the output
    assert not accepts(name, are_tokens, two, parallel=False)
    assert not accepts(name, are_tokens, two, parallel=False, required=False)
    assert accepts(name, are_tokens, rendered(name, [PARIS]), parallel=False)


@both
def test_without_a_required_call_only_calls_are_constrained(name, are_tokens):
    def accepted(text):
        return accepts(name, are_tokens, text, required=False)

    text = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    assert accepted(text + "Hello, [1] {x} (y).\nBye")
    assert accepted(text + '{"answer": [1]}')
    assert accepted(text + "[1, 2]")
    assert accepted(rendered(name, [PARIS]))
    assert not accepted(rendered(name, [PARIS]).replace("city", "town"))
    # A tool that is not strict takes any arguments.
    assert accepted(rendered(name, [("get_time", {"town": "Paris", "days": "many"})]))


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("name", AFTER_TEXT)
def test_a_call_that_is_not_required_may_follow_text(name, are_tokens):
    call = rendered(name, [PARIS])
    assert accepts(name, are_tokens, f"Let me see.\n{call}", required=False)
    assert not accepts(name, are_tokens, f"Let me see.\n{call.replace('city', 'town')}", required=False)


@pytest.mark.parametrize(("name", "tag"), [("llama3-json", "<|python_tag|>"), ("pythonic", "<|python_start|>")])
def test_a_call_behind_a_tag_may_follow_text(name, tag):
    call = tag + rendered(name, [PARIS])
    assert accepts(name, True, f"Let me see.\n{call}", required=False)
    assert not accepts(name, True, f"Let me see.\n{call.replace('city', 'town')}", required=False)


def test_reasoning_precedes_the_call_of_gpt_oss():
    reasoning = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert accepts("gpt-oss", True, reasoning + rendered("gpt-oss", [PARIS]))
    assert not accepts("gpt-oss", True, reasoning + "<|channel|>final<|message|>Hello")


def test_gpt_oss_calls_a_tool_or_gives_a_structured_answer():
    rule = '%json {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}'
    markers = markers_of("gpt-oss", True)
    grammar = FORMATS["gpt-oss"].answer_grammar(rule, TOOLS, token_ids=ids_of(markers))

    def accepted(output):
        return follows(grammar, markers, output)

    reasoning = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    answer = "<|channel|>final<|message|>"
    assert accepted(reasoning + rendered("gpt-oss", [PARIS]))
    assert accepted(reasoning + answer + '{"a": 1}')
    assert not accepted(answer + "Hello")
    assert not accepted(rendered("gpt-oss", [("get_weather", {"town": "Paris"})]))


#: Grammars whose names may be those of a tool format's, each with texts that follow it and texts that do not.
ANSWERS = [
    (StructuredOutput("x", "regex", r"[A-Z]{2}\d+ ?ok"), ("AB12 ok", "ZZ9ok"), ("ab12", "AB12 ok!", "")),
    (StructuredOutput("x", "choice", ["yes", "no", "yes sir"]), ("yes", "yes sir"), ("maybe", "nope")),
    (StructuredOutput("x", "grammar", 'root ::= call ("," call)*\ncall ::= [a-z]+'), ("a,b", "call"), ("a,", "1")),
    (StructuredOutput("x", "grammar", 'start: "<" TEXT\nTEXT: /[a-z]+/\n%ignore / /'), ("<a", "< a"), ("a", "<a>")),
    (StructuredOutput("x", "json_object"), ('{"a": 1}', '{"name": "Bob"}'), ("[]", "hello")),
    (StructuredOutput("x", "json_schema", {"type": "array"}), ("[]", '["a"]', "[{}]"), ("{}", "a")),
    (
        StructuredOutput("x", "structural_tag", {"format": {"type": "tag", "begin": "<f>", "content": {
            "type": "json_schema", "json_schema": {"type": "object"}}, "end": "</f>"}}),
        ("<f>{}</f>",), ("<f>[]</f>", "plain"),
    ),
]  # fmt: skip


@pytest.mark.slow(sample=0.4)
@both
@pytest.mark.parametrize(
    ("wanted", "good", "bad"), ANSWERS, ids=[f"{i}-{one[0].kind}" for i, one in enumerate(ANSWERS)]
)
def test_an_answer_follows_its_own_grammar_or_calls_tools(name, are_tokens, wanted, good, bad):
    markers, tool_format, head = markers_of(name, are_tokens), FORMATS[name], ""
    if tool_format.covers_reasoning:
        head = "<|channel|>final<|message|>"
        grammar = tool_format.answer_grammar(answer_rule(to_lark(wanted)), TOOLS, token_ids=ids_of(markers))
    else:
        calling = tool_format.grammar(TOOLS, parallel=True, required=True, token_ids=ids_of(markers))
        grammar = calls_or_answer(calling, to_lark(wanted))
    assert follows(grammar, markers, rendered(name, [PARIS]))
    if (name, wanted.kind) != ("llama3-json", "json_object"):  # whose calls are objects like any other
        assert not follows(grammar, markers, rendered(name, [PARIS]).replace("city", "town"))
    assert [follows(grammar, markers, head + text) for text in good] == [True] * len(good)
    assert [follows(grammar, markers, head + text) for text in bad] == [False] * len(bad)


NESTED = Tool(
    "book",
    "",
    {
        "type": "object",
        "properties": {
            "who": {"type": "array", "items": {"$ref": "#/$defs/person"}, "maxItems": 2},
            "class": {"enum": ["first", "second"]},
            "seats": {"type": "integer", "minimum": 1, "maximum": 9},
            "note": {"type": ["string", "null"], "maxLength": 4},
            "where": {
                "type": "object",
                "properties": {"row": {"type": "number"}, "window": {"type": "boolean"}},
                "additionalProperties": False,
            },
        },
        "required": ["who", "class"],
        "additionalProperties": False,
        "$defs": {"person": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
                             "additionalProperties": False}},
    },
    is_strict=True,
)  # fmt: skip
NO_ARGUMENTS = Tool("stop-it", "", {})


def random_output(matcher, chance, tokenizer_size):
    """Token ids that the grammar allows, or None if the output does not end in time."""
    mask = llguidance.numpy.allocate_token_bitmask(1, tokenizer_size)
    ids = []
    while len(ids) < 1_500:
        llguidance.numpy.fill_next_token_bitmask(matcher, mask)
        bits = numpy.unpackbits(mask.view(numpy.uint8)[0], bitorder="little")
        allowed = [int(i) for i in numpy.flatnonzero(bits) if i < tokenizer_size]
        likely = [i for i in allowed if i == EOS or i >= FIRST_MARKER or chr(i) in '"}])\n0123']
        token = chance.choice(likely if likely and chance.random() < 0.7 else allowed)
        if token == EOS:
            return ids
        ids.append(token)
        assert matcher.consume_token(token)
    return None


@pytest.mark.slow(sample=0.4)
@both
def test_what_the_grammar_accepts_the_parser_reads(name, are_tokens):
    markers = markers_of(name, are_tokens)
    tools = (NESTED, WEATHER, NO_ARGUMENTS)
    num_read = 0
    for seed in range(12):
        matcher = matcher_of(name, are_tokens, tools=tools)
        ids = random_output(matcher, random.Random(seed), FIRST_MARKER + len(markers))
        if ids is None:
            continue
        output = b"".join(bytes([i]) if i < EOS else markers[i - FIRST_MARKER].encode() for i in ids).decode()
        pieces = parse(FORMATS[name].parser(tools, token_ids=ids_of(markers)), cut(output, markers, ()))
        read = calls(pieces)
        assert read, output
        assert texts(pieces).strip() == "" or name == "gpt-oss", output
        for tool, arguments in read:
            properties = next(t for t in tools if t.name == tool).parameters.get("properties")
            decoded = json.loads(arguments)
            assert properties is None or decoded.keys() <= properties.keys(), output
            num_read += 1
    assert num_read > 1


@both
def test_required_calls_have_no_text_wherever_they_are_cut_off(name, are_tokens):
    markers = markers_of(name, are_tokens)
    whole = cut(rendered(name, [PARIS, UTC]), markers, ())
    for count in range(len(whole)):
        text, token = whole[count]
        for length in range(len(text)) if token is None else (0,):
            pushed = [*whole[:count], *([(text[:length], None)] if length else [])]
            parser = RequiredCallsParser(FORMATS[name].parser(TOOLS, token_ids=ids_of(markers)))
            assert texts(parse(parser, pushed)) == "", pushed
