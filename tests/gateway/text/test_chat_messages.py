"""What chat templates see of messages, tools and other fields of a chat."""

import json
import re

import pytest

from common.errors import RequestError
from gateway.http.protocol.decoding import decode
from gateway.http.protocol.openai import ChatCompletionRequest
from gateway.text.chat_template import ChatTemplate, render_chat

OFF = {"enable_thinking": False, "thinking": False}
USER = {"role": "user", "content": "Hi"}
#: Shows what it gets, as JSON.
SHOW = ChatTemplate(
    "{{ {'messages': messages, 'tools': tools, 'documents': documents, 'extra': extra | default(none),"
    " 'enable_thinking': enable_thinking | default(none), 'thinking': thinking | default(none),"
    " 'reasoning_effort': reasoning_effort | default(none)} | tojson }}",
    {},
)
PLAIN = ChatTemplate(
    "{% for message in messages %}<{{ message.role }}>{{ message.content.strip() }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    {},
)


def rendered(template, *messages, **fields):
    body = decode(ChatCompletionRequest, json.dumps({"messages": messages or [USER], **fields}).encode())
    return render_chat(template, body)


def shown(*messages, **fields):
    return json.loads(rendered(SHOW, *messages, **fields))


def refusal(*messages, **fields):
    with pytest.raises(RequestError) as caught:
        rendered(PLAIN, *messages, **fields)
    return caught.value.param


# ---- messages --------------------------------------------------------------------------------------------------------


def test_the_arguments_of_earlier_calls_are_objects():
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"function": {"name": "find", "arguments": {"b": [2]}}},
        {"id": "c3", "function": {"name": "find"}},
        {"id": "c4", "function": {"name": "find", "arguments": ""}},
        {"id": "c5", "function": {"name": "find", "arguments": "{a"}},
        {"id": "c6", "function": {"name": "find", "arguments": "[1]"}},
        {"id": "c7", "function": {"name": "find", "arguments": None}},
    ]
    answer = {"role": "assistant", "tool_calls": calls, "refusal": None, "annotations": []}
    result = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": [{"type": "text", "text": "1"}]}
    assert shown(USER, answer, result)["messages"] == [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}, "id": "c1"},
                {"type": "function", "function": {"name": "find", "arguments": {"b": [2]}}},
                {"type": "function", "function": {"name": "find", "arguments": {}}, "id": "c3"},
                {"type": "function", "function": {"name": "find", "arguments": {}}, "id": "c4"},
                {"type": "function", "function": {"name": "find", "arguments": {"INVALID_JSON": "{a"}}, "id": "c5"},
                {"type": "function", "function": {"name": "find", "arguments": {"INVALID_JSON": "[1]"}}, "id": "c6"},
                {"type": "function", "function": {"name": "find", "arguments": {}}, "id": "c7"},
            ],
        },
        {"role": "tool", "content": "1", "name": "add", "tool_call_id": "c1"},
    ]


def test_a_tool_may_have_no_result():
    result = {"role": "tool", "tool_call_id": "c1", "content": None}
    assert shown(USER, CALL_AND_RESULT[0], result)["messages"][2] == {**result, "content": ""}
    assert refusal({"role": "user", "content": None}) == "messages[0].content"


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        ({"content": None}, {"content": ""}),
        ({}, {"content": ""}),
        ({"content": None, "tool_calls": []}, {"content": ""}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"content": "a", "reasoning_content": "hm"}, {"content": "a", "reasoning_content": "hm"}),
        ({"content": "a", "reasoning": "hm"}, {"content": "a", "reasoning_content": "hm"}),
        ({"content": "a", "audio": None, "function_call": None}, {"content": "a"}),
    ],
)
def test_assistant_turns_may_lack_content(message, seen):
    assert shown(USER, {"role": "assistant", **message})["messages"][1] == {"role": "assistant", **seen}


SYSTEM, LATE = ({"role": "system", "content": text} for text in ("s", "late"))
ANSWER = {"role": "assistant", "content": "a"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "1"}
LINES = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('only at first') }}{% endfor %}" + LINES,
        LINES.replace("in messages", "in messages if message.role != 'system' or message == messages[0]"),
        "{% set last = namespace() %}"
        "{% for m in messages if m.role == 'system' %}{% set last.text = m.content %}{% endfor %}"
        "{% if last.text %}system: {{ last.text }}\n{% endif %}"
        + LINES.replace("in messages", "in messages if message.role != 'system'"),
    ],
    ids=["refuses", "leaves out", "leaves out the first"],
)
@pytest.mark.parametrize(
    ("messages", "seen"),
    [
        ([SYSTEM, LATE, USER], "system: s\n\nlate\nuser: Hi\n"),
        ([SYSTEM, USER, LATE, LATE], "system: s\nuser: Hi\n\nlate\n\nlate\n"),
        ([SYSTEM, USER, LATE, USER], "system: s\nuser: Hi\n\nlate\n\nHi\n"),
        ([USER, ANSWER, RESULT, LATE], "user: Hi\nassistant: a\ntool: 1\n\nlate\n"),
        ([USER, ANSWER, LATE, USER, ANSWER], "user: Hi\nassistant: a\nuser: late\n\nHi\nassistant: a\n"),
        ([USER, ANSWER, LATE], "user: Hi\nassistant: a\nuser: late\n"),
    ],
)
def test_a_template_of_one_system_message_shows_later_ones_with_the_message_before(template, messages, seen):
    assert rendered(ChatTemplate(template, {}), *messages) == seen


@pytest.mark.parametrize(
    ("messages", "seen"),
    [
        ([SYSTEM, USER, LATE, USER], "system: s\nuser: Hi\n\nlate\n\nHi\n"),
        ([SYSTEM, USER, ANSWER, LATE, USER], "system: s\nuser: Hi\nassistant: a\nuser: late\n\nHi\n"),
    ],
)
def test_a_template_that_counts_the_turns_shows_later_system_messages_in_those_of_the_user(messages, seen):
    """As Gemma 3's, which takes a system message for an answer where one is due, and refuses it elsewhere."""
    counts = (
        "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turn') }}{% endif %}{% endfor %}"
    )
    assert rendered(ChatTemplate(counts + LINES, {}), *messages) == seen


def test_other_templates_show_system_messages_where_they_stand():
    expected = "system: s\nuser: Hi\nsystem: late\nuser: Hi\n"
    assert rendered(ChatTemplate(LINES, {}), SYSTEM, USER, LATE, USER) == expected


def test_text_parts_are_joined_by_line_breaks_and_developers_are_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    assert shown({"role": "developer", "content": parts})["messages"] == [{"role": "system", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "system"}, "messages[0].content"),
        ({"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "a", "tool_call_id": "c1"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "audio": {"id": "a1"}}, "messages[0].audio"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal"),
    ],
)
def test_bad_messages_are_refused_with_the_field_named(message, param):
    assert refusal(message) == param


# ---- what some templates expect of messages --------------------------------------------------------------------------


CALL_ID = "call_" + "0123456789ab" * 2 + "00000"
ADD = {"name": "add", "arguments": '{"a": 1}'}
#: As Mistral's: refuses ids of other lengths.
NINE = ChatTemplate(
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "{% if not call.id is defined or call.id|length != 9 %}{{ raise_exception('nine letters!') }}{% endif %}"
    "[{{ call.id }}]{% endfor %}{% if message.role == 'tool' %}"
    "{% if message.tool_call_id|length != 9 %}{{ raise_exception('nine letters!') }}{% endif %}"
    "({{ message.tool_call_id }}){% endif %}{% endfor %}",
    {},
)


@pytest.mark.parametrize("call_id", [CALL_ID, "toolu_0100", "c1", "größe-neun"])
def test_ids_of_calls_have_nine_characters_where_the_template_refuses_others(call_id):
    calls = [{"id": call_id, "function": ADD}, {"id": "other", "function": ADD}]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in calls]
    text = rendered(NINE, USER, {"role": "assistant", "tool_calls": calls}, *results)
    found = re.fullmatch(r"\[([0-9A-Za-z]{9})\]\[([0-9A-Za-z]{9})\]\(\1\)\(\2\)", text)
    assert found and found[1] != found[2]


def test_short_ids_of_calls_have_nine_characters_where_the_template_refuses_them():
    """As that of Mistral Small 3.1, which shows the last nine of longer ones."""
    template = ChatTemplate(NINE.source.replace("!=", "<"), {})
    call = {"id": "c1", "function": ADD}
    assert re.fullmatch(r"\[[0-9a-f]{9}\]", rendered(template, USER, {"role": "assistant", "tool_calls": [call]}))


def test_an_id_of_nine_characters_stays():
    call = {"id": "abcDEF123", "function": ADD}
    assert rendered(NINE, USER, {"role": "assistant", "tool_calls": [call]}) == "[abcDEF123]"


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize("condition", ["message['content'] is none", "message['tool_calls']"])
def test_calls_reach_templates_that_join_their_arguments_to_text(condition, arguments, content):
    """As DeepSeek's, of which some look for calls only in turns whose content is null."""
    template = ChatTemplate(
        "{% for message in messages %}{% if " + condition + " %}{% for tool in message['tool_calls'] %}"
        "{{ tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```' }}"
        "{{ '|' ~ tool.function.arguments }}|{{ tool.function.arguments | tojson }}|{{ tool.function.arguments.a }}"
        "{% endfor %}{% endif %}{% if message['content'] %}{{ message['content'] }};{% endif %}{% endfor %}",
        {},
    )
    call = {"id": "c1", "function": {"name": "add", "arguments": arguments}}
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    assert rendered(template, USER, turn) == 'Hi;add\n```json\n{"a": 1}\n```|{"a": 1}|{"a": 1}|1'


def test_the_content_of_calls_is_text_where_the_template_takes_null_and_empty_content_alike():
    template = ChatTemplate(
        "{% for message in messages %}{% if message['content'] is none or message['content'] == '' %}none"
        "{% endif %}{{ message['content'] | length }}{% endfor %}",
        {},
    )
    assert rendered(template, USER, {"role": "assistant", "tool_calls": [{"function": ADD}]}) == "2none0"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"content": None, "reasoning_content": "hm", "tool_calls": [{"function": ADD}]}, "thinking: hm"),
        ({"content": "a", "reasoning_content": "hm", "tool_calls": [{"function": ADD}]}, "content: a"),
        ({"content": "a", "reasoning": "hm"}, "thinking: hm"),
        ({"content": "a"}, "content: a"),
    ],
)
def test_reasoning_reaches_templates_that_name_it_thinking(fields, expected):
    """As gpt-oss's, which refuses calls beside both."""
    template = ChatTemplate(
        "{% set turn = namespace(text='') %}{% for message in messages %}"
        "{% if message.tool_calls and message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{% set turn.text = 'thinking: ' + message.thinking if 'thinking' in message else "
        "'content: ' + message.content %}{% endfor %}{{ turn.text }}",
        {},
    )
    assert rendered(template, USER, {"role": "assistant", **fields}) == expected


# ---- what a template cannot render -----------------------------------------------------------------------------------


def error_of(template, *messages):
    with pytest.raises(RequestError) as caught:
        rendered(template, *messages)
    assert caught.value.status == 400
    assert caught.value.param == "messages"
    return caught.value.message


CALL_AND_RESULT = [
    {"role": "assistant", "tool_calls": [{"id": "c1", "function": ADD}]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]
#: As Gemma 2's, which knows no tools.
TWO_ROLES = ChatTemplate(
    "{% for message in messages %}{% if message.role != ('user', 'assistant')[loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.content }}{% endfor %}",
    {},
)


def test_a_template_that_refuses_calls_is_named_as_the_reason_with_what_it_said():
    message = "messages: the model's chat template cannot render {}: roles must alternate"
    assert error_of(TWO_ROLES, USER, *CALL_AND_RESULT) == message.format("tool calls of earlier turns")
    assert error_of(TWO_ROLES, USER, ANSWER, ANSWER, CALL_AND_RESULT[1]) == message.format("them")


def test_neighbours_of_one_role_are_joined_where_a_template_refuses_them():
    """As Mistral's own library does. The templates of Mistral and Gemma have this condition."""
    assert rendered(TWO_ROLES, USER, ANSWER, USER) == "HiaHi"
    assert rendered(TWO_ROLES, USER, ANSWER, ANSWER, USER, USER) == "Hia\n\naHi\n\nHi"


def test_a_user_message_behind_a_result_follows_its_text_where_a_template_refuses_it():
    """As in a message of Anthropic's API with a tool's result and text behind it."""
    template = ChatTemplate(
        "{% set ns = namespace(is_user=false) %}{% for message in messages %}{% if message.role == 'user' %}"
        "{% if ns.is_user %}{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.is_user = true %}"
        "{% elif message.role == 'assistant' and not message.tool_calls %}{% set ns.is_user = false %}{% endif %}"
        "<{{ message.role }}>{{ message.content }}{% endfor %}",
        {},
    )
    text = rendered(template, USER, *CALL_AND_RESULT, USER, ANSWER, USER)
    assert text == "<user>Hi<assistant><tool>2\n\nHi<assistant>a<user>Hi"


def test_each_call_stands_before_its_result_where_a_template_takes_one_call_of_a_turn():
    """As that of Llama 3.1."""
    template = ChatTemplate(
        "{% for message in messages %}{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
        "{{ raise_exception('only single calls') }}{% endif %}{{ message.tool_calls[0].id }}{% endif %}"
        "<{{ message.content }}>{% endfor %}",
        {},
    )
    calls = [{"id": name, "function": ADD} for name in ("c1", "c2", "c3")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ("c3", "c1", "c2")]
    turn = [{"role": "assistant", "content": "Both", "tool_calls": calls}, *results]
    text = "c1<Both><of c1>c2<><of c2>c3<><of c3>"
    assert rendered(template, USER, *turn, ANSWER) == f"<Hi>{text}<a>"
    assert rendered(template, USER, *turn, *turn) == f"<Hi>{text}{text}", "ids may come again"
    assert rendered(template, *turn, USER) == f"{text}<Hi>", "no more is changed than this template demands"


def test_a_system_message_begins_that_of_the_user_where_a_template_knows_no_such_role():
    """As that of Gemma 2."""
    system = {"role": "system", "content": "Be brief"}
    assert rendered(TWO_ROLES, system, USER, USER, ANSWER, USER) == "Be brief\n\nHi\n\nHiaHi"
    assert rendered(TWO_ROLES, {**system, "role": "developer"}, USER) == "Be brief\n\nHi"


def test_an_empty_user_message_precedes_a_greeting_of_the_assistant_where_a_template_refuses_it():
    """As those of Mistral and Gemma."""
    template = ChatTemplate(
        "{% set chat = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% for message in chat %}{% if message.role != ('user', 'assistant')[loop.index0 % 2] %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<{{ message.content }}>{% endfor %}",
        {},
    )
    system = {"role": "system", "content": "Be brief"}
    assert rendered(template, ANSWER, USER) == "<><a><Hi>"
    assert rendered(template, system, ANSWER, USER, USER) == "<><a><Hi\n\nHi>"
    assert rendered(TWO_ROLES, system, ANSWER, USER) == "Be brief\n\naHi"
    assert rendered(PLAIN, ANSWER, USER, add_generation_prompt=False) == "<assistant>a</><user>Hi</>"


def test_a_variable_that_a_template_lacks_can_be_given():
    """As firefunction's, which shows functions that it takes from outside."""
    template = ChatTemplate("{{ functions + messages[0].content }}", {})
    message = "messages: the model's chat template cannot render them: 'functions' is undefined"
    assert error_of(template, USER) == f"{message}; chat_template_kwargs can define it"
    assert rendered(template, USER, chat_template_kwargs={"functions": "f: "}) == "f: Hi"


# ---- other fields ----------------------------------------------------------------------------------------------------


def test_tools_and_documents_reach_the_template_as_they_were_sent():
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    strict = {"type": "function", "function": {"name": "g", "description": "", "parameters": {"a": 1}, "strict": True}}
    documents = [{"title": "t", "text": "x"}]
    seen = shown(tools=[tool, strict], documents=documents)
    assert (seen["tools"], seen["documents"]) == ([tool, strict], documents)
    assert shown(tools=[tool], tool_choice="none")["tools"] is None
    assert (shown()["tools"], shown(tools=[])["tools"]) == (None, None)


@pytest.mark.parametrize("parts", [{}, {"description": None, "parameters": None}, {"parameters": {}}])
def test_a_tool_has_a_description_and_parameters_which_some_templates_need(parts):
    """That of gpt-oss joins the description to text."""
    template = ChatTemplate("{{ '// ' + tools[0].function.description }}{{ tools[0].function.parameters.type }}", {})
    assert rendered(template, tools=[{"type": "function", "function": {"name": "f", **parts}}]) == "// object"


@pytest.mark.parametrize(
    ("fields", "is_thinking", "effort"),
    [
        ({}, None, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "xhigh"}, True, "xhigh"),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, True, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "high"}, True, "high"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False, None),
        ({"chat_template_kwargs": OFF}, False, None),
        ({"reasoning_effort": "low", "chat_template_kwargs": OFF}, False, "low"),
    ],
)
def test_thinking_and_its_effort_are_variables_of_the_template(fields, is_thinking, effort):
    seen = shown(**fields)
    assert (seen["enable_thinking"], seen["thinking"], seen["reasoning_effort"]) == (is_thinking, is_thinking, effort)


def test_a_template_argument_may_have_any_name():
    assert shown(chat_template_kwargs={"extra": {"a": 1}, "self": 2, "variables": 3})["extra"] == {"a": 1}


# ---- the final message -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["I am", "e", " two  words ", "<user>", "</>"])
def test_the_final_message_can_be_continued(content):
    answer = {"role": "assistant", "content": content}
    text = rendered(PLAIN, USER, answer, continue_final_message=True, add_generation_prompt=False)
    assert text == f"<user>Hi</><assistant>{content.lstrip()}"


def test_the_generation_prompt_can_be_left_out():
    assert rendered(PLAIN, USER) == "<user>Hi</><assistant>"
    assert rendered(PLAIN, USER, add_generation_prompt=False) == "<user>Hi</>"


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([USER], {}, "continue_final_message"),
        ([USER, {"role": "assistant", "content": ""}], {}, "continue_final_message"),
        ([USER, {"role": "assistant", "content": "a"}], {"add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
def test_only_a_final_assistant_message_with_content_can_be_continued(messages, fields, param):
    assert refusal(*messages, continue_final_message=True, **fields) == param


def test_a_template_that_hides_the_final_message_cannot_continue_it():
    with pytest.raises(RequestError) as caught:
        rendered(
            ChatTemplate("{{ messages[0].content }}", {}),
            USER,
            {"role": "assistant", "content": "a"},
            continue_final_message=True,
        )
    assert caught.value.param == "continue_final_message"


def test_requests_with_tools_take_the_template_that_the_model_has_for_them(tmp_path):
    """As ``apply_chat_template`` of transformers does. Hermes 2 Pro and Command R have such templates."""

    tool = {"type": "function", "function": {"name": "add"}}

    def both():
        template = ChatTemplate.load(tmp_path)
        return rendered(template), rendered(template, tools=[tool])

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert both() == ("plain", "add")
    (tmp_path / "chat_template.jinja").write_text("of a file")
    assert both() == ("of a file", "of a file"), "a file replaces all templates in tokenizer_config.json"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert both() == ("of a file", "with tools")
    assert rendered(ChatTemplate.load(tmp_path, tmp_path / "chat_template.jinja"), tools=[tool]) == "of a file"
