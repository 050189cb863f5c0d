"""Reasoning is divided from the answer, whatever the cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.outputs import TOOLS, calls, cut, cuts, parse, reasoning, texts

from common.errors import ConfigError
from gateway.text.output_parser import ReasoningPiece, TextParser, TextPiece
from gateway.text.reasoning_parsers import reasoning_format
from gateway.text.tool_parsers.registry import tool_format

MARKERS = ("<think>", "</think>")


def parsed(name, text, *, is_open=False, tokens=(), places=(), inner=None):
    format = reasoning_format(name, "")
    token_ids = {marker: i for i, marker in enumerate(tokens)}
    parser = format.parser(inner or TextParser(), is_open=is_open, token_ids=token_ids)
    return parse(parser, cut(text, tokens, places))


@pytest.mark.parametrize("tokens", [(), MARKERS])
def test_reasoning_and_answer_without_the_line_breaks_between_them(tokens):
    text = "<think>\nTwo and\n\ntwo.\n</think>\n\nIt is 4.\n"
    expected = [ReasoningPiece("Two and\n\ntwo."), TextPiece("It is 4.\n")]
    assert parsed("qwen3", text, tokens=tokens) == expected
    assert parsed("qwen3", text.removeprefix("<think>"), is_open=True, tokens=tokens) == expected


def test_reasoning_between_the_markers_of_magistral():
    expected = [ReasoningPiece("Two and two."), TextPiece("It is 4.")]
    assert parsed("mistral", "[THINK]Two and two.[/THINK]It is 4.", tokens=("[THINK]", "[/THINK]")) == expected


@pytest.mark.parametrize(
    "template", ["{{ content.split('</think>')[-1] }}", "{{ '<think>' + reasoning + '</think>' }}"]
)
def test_the_answer_of_a_model_whose_template_only_handles_earlier_reasoning_is_text(template):
    format = reasoning_format("auto", template)
    is_open = format.is_open_after("<|im_start|>assistant\n")
    assert parsed(format.name, "It is 4.", is_open=is_open) == [TextPiece("It is 4.")]


def test_an_output_without_a_start_marker_is_reasoning_only_if_it_is_open():
    assert parsed("qwen3", "4</think>5") == [TextPiece("4</think>5")]
    assert parsed("qwen3", "4</think>5", is_open=True) == [ReasoningPiece("4"), TextPiece("5")]


def test_only_the_first_block_counts():
    text = "<think>a</think>b<think>c</think>"
    assert parsed("qwen3", text) == [ReasoningPiece("a"), TextPiece("b<think>c</think>")]
    assert parsed("qwen3", "b" + text) == [TextPiece("b" + text)]


def test_empty_reasoning_has_no_piece():
    assert parsed("qwen3", "<think>\n\n</think>\n\nHello") == [TextPiece("Hello")]


def test_reasoning_cut_off_is_all_reasoning():
    assert parsed("deepseek-r1", "Hm, </thi", is_open=True) == [ReasoningPiece("Hm, </thi")]


def test_calls_follow_the_reasoning():
    tool = tool_format("hermes", "").parser(TOOLS, token_ids={})
    text = '<think>I <tool_call> now</think>\n\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    pieces = parsed("qwen3", text, inner=tool)
    assert reasoning(pieces) == "I <tool_call> now"
    assert calls(pieces) == [("get_time", "{}")]
    assert texts(pieces) == ""


def test_markers_of_other_parsers_are_handed_over_with_their_ids():
    tokens = (*MARKERS, "<tool_call>", "</tool_call>")
    tool = tool_format("hermes", "").parser(TOOLS, token_ids={"<tool_call>": 2, "</tool_call>": 3})
    text = '<think>a</think><tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    assert calls(parsed("qwen3", text, tokens=tokens, inner=tool)) == [("get_time", "{}")]


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek-r1", "<｜Assistant｜>", True),
        ("deepseek-r1", "<｜Assistant｜></think>", False),
    ],
)
def test_the_prompt_says_whether_the_reasoning_is_open(name, prompt, is_open):
    assert reasoning_format(name, "").is_open_after(prompt) is is_open


def test_names_and_aliases():
    assert reasoning_format("none", "<think>") is None
    assert reasoning_format("deepseek_r1", "").name == "deepseek-r1"
    with pytest.raises(ConfigError, match="--reasoning-parser nope: there is no such format; known names are auto"):
        reasoning_format("nope", "")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\n' if enable_thinking }}", "qwen3"),
        ("{% if not thinking %}</think>{% endif %}", "qwen3"),
        ("{{ content.split('</think>')[-1] }}", "qwen3"),
        ("{{ '[THINK]' + block['thinking'] + '[/THINK]' }}", "mistral"),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt-oss"),
        ("{{ content }}", None),
    ],
)
def test_auto_reads_the_chat_template(template, name):
    format = reasoning_format("auto", template)
    assert (format and format.name) == name


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", "<", "th", " ", "a", "/think>"]), max_size=12).map("".join),
    cuts,
    st.booleans(),
    st.booleans(),
)
def test_the_cut_of_an_output_does_not_matter_and_only_whitespace_is_lost(text, places, is_open, are_tokens):
    options = {"is_open": is_open, "tokens": MARKERS if are_tokens else ()}
    pieces = parsed("qwen3", text, **options)
    assert parsed("qwen3", text, places=places, **options) == pieces
    kept = "".join((reasoning(pieces) + texts(pieces)).split())
    without_start = text.replace("<think>", "", 1)
    candidates = [text, without_start, text.replace("</think>", "", 1), without_start.replace("</think>", "", 1)]
    assert kept in ["".join(candidate.split()) for candidate in candidates]
