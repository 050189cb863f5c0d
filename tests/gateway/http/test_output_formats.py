"""Formats that are recognised in the chat template of a checkpoint, in chats from request to answer."""

import json
import shutil

import pytest
from support.gateway.fake_nodes import EOS, MODEL, make_tokenizer, running
from tokenizers import AddedToken

from common.errors import ConfigError, ErrorCode
from gateway.text.tokenizer import Tokenizer
from gateway.text.tool_parsers.registry import FORMATS

#: As Qwen 3's: tools in the system's turn, calls in ``<tool_call>``, reasoning that can be turned off.
TEMPLATE = """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them within <tool_call></tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": ADD}}]
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A checkpoint whose markers are tokens."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKERS])
    folder = tmp_path_factory.mktemp("qwen")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": EOS}))
    return folder


@pytest.fixture
async def stack(qwen):
    async with running(qwen) as running_stack:
        await running_stack.pair()
        yield running_stack


def text_of(folder):
    return Tokenizer.load(folder)


def answers(stack, folder, text):
    """Make the nodes answer with this text, one token in each message, and the end token."""
    prefill, decode = stack.nodes
    ids = tuple(text_of(folder).encode(text + EOS, add_special_tokens=False))
    prefill.on_generate = lambda node, generate: node.tokens(generate.rid, 0, ids[:1])

    def rest(node, generate):
        for i in range(1, len(ids)):
            node.tokens(generate.rid, i, ids[i : i + 1], finish="stop" if i == len(ids) - 1 else "")

    decode.on_generate = rest


def sent(stack):
    return list(stack.nodes[0].generates.values())[-1]


ANSWER = '<think>\nOne and one?\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("is_stream", [False, True])
async def test_reasoning_text_and_calls_are_recognised_by_the_template(stack, qwen, is_stream):
    answers(stack, qwen, ANSWER)
    body = {"messages": HI, "tools": TOOLS}
    if is_stream:
        _, *chunks, _ = await stack.stream("/v1/chat/completions", body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        message = {
            field: "".join(delta.get(field, "") for delta in deltas) for field in ("reasoning_content", "content")
        }
        entries = [entry["function"] for delta in deltas for entry in delta.get("tool_calls", ())]
        function = {"name": entries[0]["name"], "arguments": "".join(entry["arguments"] for entry in entries)}
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        _, answer = await stack.post("/v1/chat/completions", body)
        (choice,) = answer["choices"]
        message, reason = choice["message"], choice["finish_reason"]
        (call,) = message["tool_calls"]
        function = call["function"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert (message["reasoning_content"], message["content"]) == ("One and one?", "I add.")
    assert (function["name"], json.loads(function["arguments"]), reason) == ("add", {"a": 1}, "tool_calls")


async def test_the_format_of_calls_is_that_of_the_template_for_tools(qwen, tmp_path):
    """Hermes 2 Pro has one template for chats with tools, and another without a word of them."""
    folder = shutil.copytree(qwen, tmp_path / "hermes")
    named = [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": TEMPLATE}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": EOS}))
    async with running(folder) as stack:
        await stack.pair()
        answers(stack, folder, ANSWER)
        _, answer = await stack.post("/v1/chat/completions", {"messages": HI, "tools": TOOLS})
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
        assert "# Tools" in text_of(folder).decode(sent(stack).prompt, skip_special=False)


async def test_the_model_sees_tools_and_earlier_calls(stack, qwen):
    answers(stack, qwen, "Two.")
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    body = {"messages": [*HI, turn, result], "tools": TOOLS, "reasoning_effort": "none"}
    assert (await stack.post("/v1/chat/completions", body))[0] == 200
    prompt = text_of(qwen).decode(sent(stack).prompt, skip_special=False)
    assert json.dumps(TOOLS[0]) in prompt
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in prompt
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_the_model_sees_only_the_tools_that_are_allowed(stack, qwen, path):
    answers(stack, qwen, "Two.")
    functions = [{"name": name, "parameters": ADD} for name in ("add", "multiply", "divide")]
    named = [{"name": name} for name in ("add", "divide")]
    if path == "/v1/responses":
        body = {"input": "Hi", "tools": [{"type": "function", **function} for function in functions]}
        tools = [{"type": "function", **tool} for tool in named]
        body["tool_choice"] = choice = {"type": "allowed_tools", "tools": tools, "mode": "required"}
        param = "tool_choice.tools"
    else:
        body = {"messages": HI, "tools": [{"type": "function", "function": function} for function in functions]}
        choice = {"tools": [{"type": "function", "function": tool} for tool in named], "mode": "required"}
        body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": choice}
        param = "tool_choice.allowed_tools.tools"
    status, answer = await stack.post(path, body)
    assert status == 200, answer
    prompt = text_of(qwen).decode(sent(stack).prompt, skip_special=False)
    assert [name in prompt for name in ("add", "multiply", "divide")] == [True, False, True]
    grammar = sent(stack).sampling.grammar
    assert [name in grammar for name in ("add", "multiply", "divide")] == [True, False, True]
    choice["mode"] = "auto"
    assert (await stack.post(path, body))[0] == 200
    assert not sent(stack).sampling.grammar
    body["tools"] = body["tools"][:2]
    status, answer = await stack.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"] == f"{param}: 'divide' is not one of the tools"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}, "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "tool_choice"),
    ],
)
async def test_an_incomplete_choice_of_tools_is_refused(stack, choice, param):
    body = {"messages": HI, "tools": TOOLS, "tool_choice": choice}
    status, answer = await stack.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}, "parallel_tool_calls": False},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ADD}}},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}}]},
    ],
)
async def test_grammars_of_calls_and_answers_compile_and_begin_behind_the_reasoning(stack, qwen, fields):
    answers(stack, qwen, "Two.")
    status, answer = await stack.post("/v1/chat/completions", {"messages": HI, "tools": TOOLS, **fields})
    assert status == 200, answer
    text = text_of(qwen)
    assert sent(stack).sampling.grammar
    thinking = sent(stack).sampling.thinking
    assert thinking is not None
    assert (thinking.start_id, thinking.end_id) == (text.token_id("<think>"), text.token_id("</think>"))


async def test_reasoning_that_no_token_begins_is_ruled_out_by_a_grammar(tmp_path):
    tokenizer = make_tokenizer().to_str().replace("<think>", "<thought>")
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": EOS}))
    async with running(tmp_path) as stack:
        await stack.pair()
        await stack.post("/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_object"}})
        assert sent(stack).sampling.grammar
        assert sent(stack).sampling.thinking is None
        status, answer = await stack.post("/v1/chat/completions", {"messages": HI, "thinking_budget": 9})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "thinking_budget", "not_supported")


SCHEMA = {"type": "json_schema", "name": "a", "schema": ADD}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "Hi", "guided_regex": "a"}, "guided_regex"),
        ("/v1/chat/completions", {"messages": HI, "guided_regex": "a"}, "guided_regex"),
        ("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "tool_choice": "required"}, "tools"),
        ("/v1/responses", {"input": "Hi", "text": {"format": SCHEMA}}, "text.format.schema"),
        ("/generate", {"text": "Hi", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
    ],
)
async def test_a_grammar_that_a_node_refuses_is_named_by_its_field(stack, path, fields, param):
    def refuse(node, generate):
        node.fail(generate.rid, ErrorCode.INVALID_REQUEST, "the grammar cannot be followed: too large")

    prefill, _ = stack.nodes
    prefill.on_generate = refuse
    status, answer = await stack.post(path, fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"] == f"{param}: the grammar cannot be followed: too large"


async def test_an_error_in_a_schema_has_its_place_in_all_apis(stack):
    schema = {"type": "object", "properties": {"age": {"not": {}}}}
    wanted = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    chat = {"messages": HI, "max_tokens": 9}
    for path, fields, param in (
        ("chat/completions", {"response_format": {**wanted, "json_schema": wanted}}, "response_format.json_schema"),
        ("responses", {"text": {"format": wanted}}, "text.format"),
        ("messages", {"output_config": {"format": wanted}}, "output_config.format"),
        ("messages", {"output_format": wanted}, "output_format"),
    ):
        body = {"input": "Hi", **fields} if path == "responses" else {**chat, **fields}
        status, answer = await stack.post(f"/v1/{path}", body)
        assert status == 400
        assert answer["error"]["message"].startswith(f"{param}.schema.properties.age: cannot be compiled")


async def test_an_error_in_the_parameters_of_a_tool_names_the_function(stack):
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]
    status, answer = await stack.post("/v1/chat/completions", {"messages": HI, "tools": tools})
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert answer["error"]["message"].startswith("tools: in f, schema: cannot be compiled: Unimplemented keys")


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
async def test_formats_can_be_named_and_turned_off(qwen, flag):
    with pytest.raises(ConfigError, match=flag.replace("_", "-")):
        async with running(qwen, **{flag: "nonsense"}):
            pass
    async with running(qwen, tool_call_parser="none", reasoning_parser="none") as stack:
        await stack.pair()
        answers(stack, qwen, ANSWER)
        _, answer = await stack.post("/v1/chat/completions", {"messages": HI})
        assert answer["choices"][0]["message"]["content"] == ANSWER


# ---- gpt-oss ---------------------------------------------------------------------------------------------------------

HARMONY = "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
HARMONY += "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in HARMONY_MARKERS])
    folder = tmp_path_factory.mktemp("gpt-oss")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": HARMONY, "eos_token": EOS}))
    return folder


@pytest.mark.parametrize("parser", ["auto", "none"])
async def test_the_channels_of_gpt_oss_are_reasoning_and_answer(gpt_oss, parser):
    async with running(gpt_oss, tool_call_parser=parser) as stack:
        await stack.pair()
        text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes"
        answers(stack, gpt_oss, text)
        _, answer = await stack.post("/v1/chat/completions", {"messages": HI})
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")


async def test_the_structured_answer_of_gpt_oss_is_its_final_message(gpt_oss):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": ADD}}
    async with running(gpt_oss) as stack:
        await stack.pair()
        answers(stack, gpt_oss, "<|channel|>final<|message|>{}")
        structured, regex = {"response_format": schema}, {"structured_outputs": {"regex": "a+"}}
        called = {"tools": TOOLS, "tool_choice": "required"}
        for fields in (structured, regex, called, {"tools": TOOLS, **structured}, {"tools": TOOLS, **regex}):
            status, answer = await stack.post("/v1/chat/completions", {"messages": HI, **fields})
            assert status == 200, answer
            assert sent(stack).sampling.thinking is None  # the grammar allows the reasoning
            assert "analysis" in sent(stack).sampling.grammar
        status, answer = await stack.post("/v1/chat/completions", {"messages": HI, "thinking_budget": 5})
        assert (status, answer["error"]["param"]) == (400, "thinking_budget")


@pytest.mark.slow(sample=0.34)
@pytest.mark.parametrize("parser", FORMATS)
async def test_parameters_of_tools_that_are_nested_too_deeply_are_refused(qwen, parser):
    schema = {"type": "string"}
    for _ in range(100):
        schema = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    async with running(qwen, tool_call_parser=parser) as stack:
        await stack.pair()
        status, answer = await stack.post(
            "/v1/chat/completions", {"messages": HI, "tools": tools, "tool_choice": "required"}
        )
        assert status == 400
        assert answer["error"]["param"] == "tools[0].function.parameters"


# ---- one call, and markers that are no tokens ------------------------------------------------------------------------

TWO_CALLS = "".join(
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>\n' for number in (1, 2)
)


@pytest.mark.parametrize(
    ("path", "one", "arguments"),
    [
        (
            "/v1/responses",
            {"input": "Hi", "parallel_tool_calls": False, "tools": [{"type": "function", **TOOLS[0]["function"]}]},
            lambda answer: [item["arguments"] for item in answer["output"] if item["type"] == "function_call"],
        ),
        (
            "/v1/messages",
            {
                "messages": HI,
                "max_tokens": 500,
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
                "tools": [{"name": "add", "input_schema": ADD}],
            },
            lambda answer: [json.dumps(part["input"]) for part in answer["content"] if part["type"] == "tool_use"],
        ),
    ],
)
async def test_without_parallel_calls_every_api_shows_one(stack, qwen, path, one, arguments):
    answers(stack, qwen, TWO_CALLS)
    status, answer = await stack.post(path, {"model": MODEL, **one})
    assert status == 200, answer
    assert [json.loads(text) for text in arguments(answer)] == [{"a": 1}]


async def test_an_answer_is_bound_from_its_beginning_if_no_token_begins_the_reasoning(tmp_path):
    tokenizer = json.loads(make_tokenizer().to_str())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] not in MARKERS]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": EOS}))
    async with running(tmp_path) as stack:
        await stack.pair()
        answers(stack, tmp_path, "{}")
        body = {"messages": HI, "response_format": {"type": "json_object"}}
        assert (await stack.post("/v1/chat/completions", body))[0] == 200
        assert sent(stack).sampling.grammar
        assert sent(stack).sampling.thinking is None
        status, answer = await stack.post("/v1/chat/completions", {"messages": HI, "thinking_budget": 5})
        assert (status, answer["error"]["param"]) == (400, "thinking_budget")
