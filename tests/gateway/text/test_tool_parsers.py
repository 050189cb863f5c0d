"""Every format's calls come out of its text, whatever the cut, and nothing else does."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.outputs import TOOLS, arguments_objects, calls, cut, cuts, parse, rendered, texts

from common.errors import ConfigError
from gateway.text.output_parser import ReasoningPiece, TextPiece, Tool, ToolCallArguments, ToolCallBegin
from gateway.text.tool_parsers.base import MAX_CALLS, MAX_HELD
from gateway.text.tool_parsers.registry import ALIASES, FORMATS, tool_format

HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def parsed(name, text, *, tokens=(), places=(), tools=TOOLS):
    """The parts of an output in which these markers are tokens."""
    format = tool_format(name, "")
    parser = format.parser(tools, token_ids={marker: i for i, marker in enumerate(tokens)})
    return parse(parser, cut(text, tokens, places))


def hermes(text, **options):
    return parsed("hermes", text, **options)


class TestHermes:
    def test_text_and_two_calls(self):
        text = f'Let me see.\n{HERMES}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>\n'
        expected = [
            TextPiece("Let me see."),
            ToolCallBegin(0, "get_weather"),
            ToolCallArguments(0, '{"city": "Paris"}'),
            ToolCallBegin(1, "get_time"),
            ToolCallArguments(1, "{}"),
        ]
        assert hermes(text) == expected
        assert hermes(text, tokens=("<tool_call>", "</tool_call>")) == expected

    def test_name_and_arguments_stream_as_soon_as_they_are_certain(self):
        parser = tool_format("hermes", "").parser(TOOLS, token_ids={})
        assert parser.push('Hi <tool_call>\n{"name": "get_weather') == [TextPiece("Hi")]
        assert parser.push('", "arg') == [ToolCallBegin(0, "get_weather")]
        assert parser.push('uments": {"ci') == [ToolCallArguments(0, '{"ci')]
        assert parser.push('ty": "Pa') == [ToolCallArguments(0, 'ty": "Pa')]
        assert parser.push('ris"}}</tool_') == [ToolCallArguments(0, 'ris"}')]
        assert parser.push("call>") == parser.flush() == []

    def test_the_name_may_follow_the_arguments(self):
        text = '<tool_call>{"arguments": {"zone": "UTC"}, "id": 7, "name": "get_time"}</tool_call>'
        assert calls(hermes(text)) == [("get_time", '{"zone": "UTC"}')]

    def test_a_call_without_arguments_has_an_empty_object(self):
        assert calls(hermes('<tool_call>{"name": "get_time"}</tool_call>')) == [("get_time", "{}")]

    def test_a_call_without_its_end_tag_is_complete(self):
        assert hermes(HERMES.removesuffix("</tool_call>") + "Done") == [
            ToolCallBegin(0, "get_weather"),
            ToolCallArguments(0, '{"city": "Paris"}'),
            TextPiece("\nDone"),
        ]

    @pytest.mark.parametrize(
        "text",
        [
            "Write <tool_call> to call.",
            '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "get_wea',
            '<tool_call>{"name": 5}</tool_call> ',
            "<tool_call>",
            "</tool_call> a </tool_call",
            '{"name": "get_time", "arguments": {}}',
        ],
    )
    def test_what_resembles_a_call_is_text(self, text):
        assert hermes(text) == [TextPiece(text)]
        assert hermes(text, tokens=("<tool_call>", "</tool_call>")) == [TextPiece(text)]

    def test_an_output_cut_off_keeps_the_arguments_so_far(self):
        assert calls(hermes(HERMES[:60])) == [("get_weather", '{"city": "P')]

    def test_the_arguments_may_contain_the_markers(self):
        text = '<tool_call>{"name": "get_time", "arguments": {"zone": "</tool_call>"}}</tool_call>'
        expected = [("get_time", '{"zone": "</tool_call>"}')]
        assert calls(hermes(text)) == expected
        assert calls(hermes(text, tokens=("<tool_call>", "</tool_call>"))) == expected

    def test_broken_arguments_are_passed_on_up_to_the_end_tag(self):
        text = f'<tool_call>{{"name": "get_time", "arguments": {{\'a\': 1}}}}</tool_call>{HERMES}'
        assert calls(hermes(text)) == [("get_time", "{'a': 1}}"), ("get_weather", '{"city": "Paris"}')]

    def test_a_string_that_never_ends_ends_with_the_end_tag_as_a_token(self):
        text = '<tool_call>{"name": "get_time", "arguments": {"zone": "a}}\n</tool_call>Hello'
        pieces = hermes(text, tokens=("<tool_call>", "</tool_call>"))
        assert calls(pieces) == [("get_time", '{"zone": "a}}\n')]
        assert texts(pieces) == "Hello"

    def test_markers_that_are_tokens_do_not_count_when_they_are_spelled(self):
        parser = tool_format("hermes", "").parser(TOOLS, token_ids={"<tool_call>": 1, "</tool_call>": 2})
        assert parse(parser, [(HERMES, None)]) == [TextPiece(HERMES)]

    def test_calls_beyond_the_limit_are_text(self):
        pieces = hermes(HERMES * (MAX_CALLS + 1))
        assert len(calls(pieces)) == MAX_CALLS
        assert texts(pieces) == HERMES

    def test_a_name_too_long_to_be_held_is_text(self):
        text = f'<tool_call>{{"name": "{"x" * MAX_HELD} {HERMES}'
        pieces = hermes(text)
        assert pieces == hermes(text, places=range(0, len(text), 7))
        assert calls(pieces) == [("get_weather", '{"city": "Paris"}')]

    def test_arguments_too_deep_are_broken(self):
        text = '<tool_call>{"name": "get_time", "arguments": ' + '{"a":' * 5_000
        assert calls(hermes(text))[0][1] == '{"a":' * 5_000


PARIS = ("get_weather", '{"city": "Paris"}')
UTC = ("get_time", '{"zone": "UTC"}')


class TestQwen3Coder:
    def test_types_of_the_schema_decide_what_a_value_is(self):
        text = (
            'Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n"York"\n</parameter>\n'
            "<parameter=days>\n3\n</parameter>\n<parameter=other>\nTrue\n</parameter>\n</function>\n</tool_call>"
        )
        pieces = parsed("qwen3-coder", text)
        assert calls(pieces) == [("get_weather", '{"city": "New\\n\\"York\\"", "days": 3, "other": true}')]
        assert texts(pieces) == "Sure."

    def test_two_calls_of_which_one_has_no_begin_tag_and_one_no_parameters(self):
        text = (
            "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
        )
        assert calls(parsed("qwen3-coder", text)) == [PARIS, ("get_time", "{}")]

    def test_strings_stream_and_other_values_come_whole(self):
        parser = tool_format("qwen3-coder", "").parser(TOOLS, token_ids={})
        parser.push("<tool_call><function=get_weather><parameter=city>\nPa")
        assert parser.push("r\n") == [ToolCallArguments(0, "r")]
        assert parser.push("is") == [ToolCallArguments(0, "\\nis")]
        assert parser.push("\n</parameter><parameter=days>4") == [ToolCallArguments(0, '", "days": ')]
        assert parser.push("2</parameter></function>") == [ToolCallArguments(0, "42}")]

    def test_the_end_of_the_call_as_a_token_ends_a_value(self):
        text = "<tool_call><function=get_weather><parameter=city>Paris\n</tool_call>Hello"
        pieces = parsed("qwen3-coder", text, tokens=("<tool_call>", "</tool_call>"))
        assert calls(pieces) == [PARIS]
        assert texts(pieces) == "Hello"

    @pytest.mark.parametrize("tokens", [(), ("<tool_call>", "</tool_call>")], ids=["spelled", "tokens"])
    def test_a_value_without_its_end_tag_ends_before_the_next_line_of_the_call(self, tokens):
        head = "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        tail = "\n<parameter=days>\n3\n</function>\n</tool_call>Hello"
        pieces = parsed("qwen3-coder", f"{head}Paris{tail}", tokens=tokens)
        assert calls(pieces) == [("get_weather", '{"city": "Paris", "days": 3}')]
        assert texts(pieces) == "Hello"

    def test_a_value_without_its_end_tag_keeps_its_own_last_line_break(self):
        text = "<function=get_weather>\n<parameter=city>\nParis\n\n<parameter=days>\n3\n</function>"
        assert calls(parsed("qwen3-coder", text)) == [("get_weather", '{"city": "Paris\\n", "days": 3}')]

    def test_a_value_may_contain_the_tags_within_a_line(self):
        text = "<function=get_time>\n<parameter=zone>\na <parameter=b> </function>\n</parameter>\n</function>"
        assert calls(parsed("qwen3-coder", text)) == [("get_time", '{"zone": "a <parameter=b> </function>"}')]

    @pytest.mark.parametrize("end", ["\n</function>\n</tool_call>", ""], ids=["complete", "cut off"])
    def test_text_between_parameters_follows_the_call(self, end):
        text = "<function=get_weather>\nNow\n<parameter=city>\nParis\n</parameter>\n</parameter>" + end
        arguments = '{"city": "Paris"' + ("}" if end else "")
        assert parsed("qwen3-coder", text) == [
            ToolCallBegin(0, "get_weather"),
            ToolCallArguments(0, arguments),
            TextPiece("Now\n\n</parameter>"),
        ]

    @pytest.mark.parametrize(
        ("schema", "text", "value"),
        [
            ({"type": "integer"}, "5", 5),
            ({"type": "integer"}, "five", "five"),
            ({"type": "number"}, "1.5", 1.5),
            ({"type": "number"}, "NaN", "NaN"),
            ({"type": "array"}, "[1, -Infinity]", "[1, -Infinity]"),
            ({"type": "boolean"}, "False", False),
            ({"type": "array"}, "[1, 2]", [1, 2]),
            ({"type": ["string", "null"]}, "None", None),
            ({"type": ["string", "null"]}, "5", "5"),
            ({"type": ["string", "number"]}, "5", 5),
            ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
            ({"enum": ["1", "2"]}, "1", "1"),
            ({"const": 1}, "1", 1),
            ({}, '"quoted"', "quoted"),
            ({"type": "string"}, '"quoted"', '"quoted"'),
        ],
    )
    def test_a_value_follows_its_schema(self, schema, text, value):
        tool = Tool("f", "", {"type": "object", "properties": {"x": schema}})
        output = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
        [(_, arguments)] = calls(parsed("qwen3-coder", output, tools=(tool,)))
        assert json.loads(arguments) == {"x": value}


class TestLlama3Json:
    def test_calls_at_the_beginning_and_behind_the_tag(self):
        one, other = (
            '{"name": "get_weather", "parameters": {"city": "Paris"}}',
            '{"type": "function", "name": "get_time"}',
        )
        assert calls(parsed("llama3-json", f"{one}; {other}")) == [PARIS, ("get_time", "{}")]
        assert calls(parsed("llama3-json", f"Hm <|python_tag|>{one}\n{other}", tokens=("<|python_tag|>",))) == [
            PARIS,
            ("get_time", "{}"),
        ]

    @pytest.mark.parametrize(
        "text",
        [
            '{"answer": 42}',
            'It is {"name": "get_time", "parameters": {}}',
            "<|python_tag|>print(1)",
            '{"name": "get_time',
        ],
    )
    def test_other_output_is_text(self, text):
        assert parsed("llama3-json", text) == [TextPiece(text)]
        assert parsed("llama3-json", text, tokens=("<|python_tag|>",)) == [TextPiece(text)]


class TestPythonic:
    def test_literals_become_json(self):
        text = (
            """[get_weather(city='it\\'s "P"\\n\\x41\\u00e9', days=-2, """
            """a=[True, (None,), {'k': 1e3, 2: "x"}], b='''c'd''')]"""
        )
        [(name, arguments)] = calls(parsed("pythonic", text))
        assert name == "get_weather"
        assert json.loads(arguments) == {
            "city": 'it\'s "P"\nAé',
            "days": -2,
            "a": [True, [None], {"k": 1000.0, "2": "x"}],
            "b": "c'd",
        }

    def test_a_character_that_is_written_as_json_writes_it_is_one(self):
        """Models write surrogates, which JSON has for characters such as the rocket, in Python's strings too."""
        text = r"[get_time(zone='\ud83d\ude80 \U0001f680 \ud83d', b={'\ude80': 1})]"
        [(_, arguments)] = calls(parsed("pythonic", text))
        assert arguments == r'{"zone": "\ud83d\ude80 🚀 \ud83d", "b": {"\ude80": 1}}'
        assert json.loads(arguments)["zone"].startswith("🚀 🚀")

    def test_several_calls_and_the_marks_of_llama_4(self):
        text = '<|python_start|>[get_weather(city="Paris"), get_time(zone="UTC")]<|python_end|>'
        for tokens in ((), ("<|python_start|>", "<|python_end|>")):
            pieces = parsed("pythonic", text, tokens=tokens)
            assert calls(pieces) == [PARIS, UTC]
            assert texts(pieces) == ""

    @pytest.mark.parametrize("text", ["[1, 2]", "[get_weather]", "[unknown(a=1)]", "See [get_time(zone='a')]", "["])
    def test_other_output_is_text(self, text):
        assert parsed("pythonic", text) == [TextPiece(text)]

    def test_the_rest_of_a_broken_call_belongs_to_its_arguments(self):
        assert calls(parsed("pythonic", "[get_time(UTC)]")) == [("get_time", "{UTC)]")]


class TestMistral:
    @pytest.mark.parametrize("tokens", [(), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")])
    @pytest.mark.parametrize(
        "text",
        [
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}, '
            '{"name": "get_time", "arguments": {"zone": "UTC"}}]',
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{"zone": "UTC"}',
            '[TOOL_CALLS] get_weather{"city": "Paris"}\n[TOOL_CALLS]get_time[ARGS] {"zone": "UTC"}',
        ],
    )
    def test_both_forms(self, text, tokens):
        pieces = parsed("mistral", "Let me see. " + text, tokens=tokens)
        assert calls(pieces) == [PARIS, UTC]
        assert texts(pieces) == "Let me see."

    def test_an_unknown_function_is_text(self):
        text = '[TOOL_CALLS]nothing[ARGS]{"city": "Paris"}'
        assert parsed("mistral", text) == [TextPiece(text)]


class TestDeepSeek:
    @pytest.mark.parametrize("are_tokens", [False, True])
    @pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.1"])
    def test_both_forms(self, name, are_tokens):
        text = "Yes. " + rendered(name, [("get_weather", {"city": "Paris"}), ("get_time", {"zone": "UTC"})])
        pieces = parsed("deepseek-v3", text, tokens=FORMATS[name].markers if are_tokens else ())
        assert calls(pieces) == [PARIS, UTC]
        assert texts(pieces) == "Yes."

    def test_broken_arguments_end_with_the_call(self):
        call = rendered("deepseek-v3.1", [("get_time", {"zone": "UTC"})])
        text = call.replace('{"zone": "UTC"}', "{'a'}") + call
        assert calls(parsed("deepseek-v3.1", text)) == [("get_time", "{'a'}"), UTC]


class TestHarmony:
    ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"

    @pytest.mark.parametrize("are_tokens", [False, True])
    def test_reasoning_and_answer(self, are_tokens):
        tokens = tool_format("gpt-oss", "").markers if are_tokens else ()
        text = self.ANALYSIS + "<|channel|>final<|message|>4\n<|return|>"
        assert parsed("gpt-oss", text, tokens=tokens) == [ReasoningPiece("Hm."), TextPiece("4\n")]

    @pytest.mark.parametrize("are_tokens", [False, True])
    @pytest.mark.parametrize(
        "header",
        [
            "<|channel|>commentary to=functions.get_weather <|constrain|>json",
            "<|channel|>commentary to=functions.get_weather<|constrain|>json",
            " to=functions.get_weather<|channel|>commentary json",
            "<|channel|>analysis to=get_weather code",
        ],
    )
    def test_a_call(self, header, are_tokens):
        tokens = tool_format("gpt-oss", "").markers if are_tokens else ()
        preamble = "<|channel|>commentary<|message|>A plan<|end|><|start|>assistant"
        text = self.ANALYSIS + preamble + header + '<|message|>{"city": "Paris"}'
        expected = [
            ReasoningPiece("Hm."),
            TextPiece("A plan"),
            ToolCallBegin(0, PARIS[0]),
            ToolCallArguments(0, PARIS[1]),
        ]
        assert parsed("gpt-oss", text, tokens=tokens) == expected
        assert parsed("gpt-oss", text + "<|call|>", tokens=tokens) == expected

    def test_an_unknown_recipient_is_no_call(self):
        text = "<|channel|>commentary to=functions.nothing<|message|>{}<|call|>"
        assert parsed("gpt-oss", text) == [TextPiece("{}")]
        assert parsed("gpt-oss", text.replace("commentary", "analysis")) == [ReasoningPiece("{}")]

    def test_an_output_without_channels_is_text(self):
        assert parsed("gpt-oss", "Hello") == [TextPiece("Hello")]

    @pytest.mark.parametrize("header", ["", "<|channel|>fin", " to=functions.get_time", "<|end|>"])
    def test_a_header_that_is_cut_off_is_dropped(self, header):
        assert parsed("gpt-oss", self.ANALYSIS + header) == [ReasoningPiece("Hm.")]

    def test_text_before_all_markers_comes_first(self):
        assert parsed("gpt-oss", "Hello<|end|> you") == [TextPiece("Hello you")]

    @pytest.mark.parametrize("end", ["<|call|>", ""], ids=["shown", "hidden"])
    def test_a_call_without_content_has_an_empty_object(self, end):
        text = "<|channel|>commentary to=functions.get_time<|message|>" + end
        assert calls(parsed("gpt-oss", text, tokens=tool_format("gpt-oss", "").markers)) == [("get_time", "{}")]


def test_names_aliases_and_none():
    assert all(tool_format(alias, "").name == name for alias, name in ALIASES.items())
    assert tool_format("none", "<tool_call>") is None
    with pytest.raises(
        ConfigError, match="--tool-call-parser nope: there is no such format; known names are auto, none"
    ):
        tool_format("nope", "")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\n{"name": <function-name>', "hermes"),
        ("<tool_call>\n<function=example_function_name>", "qwen3-coder"),
        ("<tool_call>{{ name }}<arg_key>", None),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3-json"),
        ("[func_name1(params_name1=params_value1)] <|python_tag|>", "pythonic"),
        ("[TOOL_CALLS] [", "mistral-list"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("<｜tool▁calls▁begin｜>function\n```json", "deepseek-v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek-v3.1"),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt-oss"),
        ("{{ messages }}", None),
    ],
)
def test_auto_reads_the_chat_template(template, name):
    format = tool_format("auto", template)
    assert (format and format.name) == name


FRAGMENTS = [
    '{"name": "get_time", "arguments": {"a": 1}}', '{"name": "get_time"', '"parameters": ', '"arguments": ',
    "get_time", "get_weather", "get_time(a=", "{", "}", "[", "]", "(", ")", '"', "'", '"""', "\\", ",", ";", ":", "=",
    "\n", " ", "text", "1", "true", "é", "<", ">", "<|", "<tool", "[TOOL_", "function", "```json\n", "```",
    "<function=get_time>", "<function=", "<parameter=", "</parameter>", "</function>",
    "assistant", "analysis", "final", "commentary to=functions.get_time",
]  # fmt: skip


def outputs_of(name):
    fragments = st.sampled_from([*FRAGMENTS, *FORMATS[name].markers])
    return st.lists(fragments, max_size=25).map("".join)


@pytest.mark.slow(sample=0.34)
@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(st.data(), cuts, st.booleans())
def test_the_cut_of_an_output_does_not_matter(name, data, places, are_tokens):
    text = data.draw(outputs_of(name))
    tokens = FORMATS[name].markers if are_tokens else ()
    whole = parsed(name, text, tokens=tokens)
    assert parsed(name, text, tokens=tokens, places=places) == whole
    assert parsed(name, text, tokens=tokens, places=range(len(text))) == whole


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gpt-oss"])
@settings(deadline=None)
@given(st.data(), cuts, st.booleans())
def test_an_output_without_a_known_function_is_text_to_the_last_character(name, data, places, are_tokens):
    text = data.draw(outputs_of(name))
    tokens = FORMATS[name].markers if are_tokens else ()
    pieces = parsed(name, text, tokens=tokens, places=places, tools=())
    assert pieces == ([TextPiece(text)] if text else [])


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("gpt-oss", "qwen3-coder")])
@settings(deadline=None)
@given(st.data(), cuts)
def test_calls_survive_a_round_trip(name, data, places):
    call = st.tuples(st.sampled_from(["get_weather", "get_time"]), arguments_objects)
    written = data.draw(st.lists(call, min_size=1, max_size=3))
    pieces = parsed(name, rendered(name, written), places=places)
    assert [(name, json.loads(arguments)) for name, arguments in calls(pieces)] == written
    assert texts(pieces) == ""


@settings(deadline=None)
@given(st.text().filter(lambda text: "</parameter>" not in text), st.integers(), cuts)
def test_values_of_qwen3_coder_survive_a_round_trip(city, days, places):
    text = (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n"
        f"<parameter=days>\n{days}\n</parameter>\n</function>\n</tool_call>"
    )
    [(_, arguments)] = calls(parsed("qwen3-coder", text, places=places))
    assert json.loads(arguments) == {"city": city, "days": days}


def long_outputs(name):
    """Long outputs that a parser might hold back, search again or nest."""
    begin = FORMATS[name].markers[0]
    size = 150_000
    yield begin * (size // len(begin))
    yield begin[:-1] * (size // len(begin))
    yield " \n" * (size // 2)
    yield f'{begin}{{"name": "' * (size // (len(begin) + 10))
    yield f'{begin}{{"name": "{"x" * size}'
    yield rendered(name, [("get_time", {"zone": "x" * size})])
    yield rendered(name, [("get_time", {"zone": [["\\", {"a": 1.5}]] * (size // 20)})])


@pytest.mark.slow(sample=0.34)
@pytest.mark.parametrize("name", FORMATS)
def test_a_long_output_is_parsed_in_linear_work(name):
    """What a parser looks at again with each push is bounded."""
    for text in long_outputs(name):
        parser = FORMATS[name].parser(TOOLS, token_ids={})
        for start in range(0, len(text), 32):
            parser.push(text[start : start + 32])
            assert len(parser._buffer) - parser._at < 64
        parser.flush()
