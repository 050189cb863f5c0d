"""Messages in any order give the same text, ids and end, and an output ends exactly once."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.fake_nodes import make_tokenizer
from support.gateway.toy_formats import ToyReasoningParser

from common.errors import ErrorCode, RequestError
from common.sampling_params import SamplingParams
from common.stage_spans import StageSpan
from common.wire.messages import Tokens
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import MAX_REPORTS, OutputStream, StageReport
from gateway.text.detokenizer import ByteDetokenizer
from gateway.text.output_parser import OutputFormat, TextParser
from gateway.text.reasoning_parsers import reasoning_format
from gateway.text.tokenizer import Tokenizer

TEXT = Tokenizer(make_tokenizer())


class Ends(list):
    """Streams that have ended, once for each end."""


def make_relay(stops=(), **sampling):
    ends = Ends()
    request = GenerateRequest("r", "r", (1, 2), SamplingParams(max_new_tokens=100, **sampling), stops=tuple(stops))

    def wake(stream):
        if stream.is_ended:
            ends.append(stream)

    return OutputStream(request, 0, lambda: TEXT.detokenizer(skip_special=True), wake, 0.0), ends


def message(index, tokens, finish="", **fields):
    return Tokens("r", 0, index, tuple(tokens), finish=finish, **fields)


def ids_of(text):
    return TEXT.encode(text, add_special_tokens=False)


@settings(deadline=None)
@given(
    st.text(min_size=1, max_size=30), st.permutations(range(6)), st.lists(st.integers(1, 30), min_size=5, max_size=5)
)
def test_messages_in_any_order_give_the_same_output(text, order, cuts):
    ids = ids_of(text)
    places = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    messages = {
        start: message(start, ids[start:end], "length" if end == len(ids) else "")
        for start, end in itertools.pairwise(places)
        if end > start
    }
    in_order = list(messages.values())
    stream, ends = make_relay()
    shown = ""
    for i in order:
        if i < len(in_order):
            stream.on_tokens(in_order[i], 1.0)
            delta = stream.take()
            shown += delta.text if delta else ""
    assert (stream.ids, stream.text, shown, stream.finish) == (ids, text, text, "length")
    assert ends == [stream]


def test_the_stop_token_is_counted_but_not_shown():
    stream, ends = make_relay()
    stream.on_tokens(message(0, [*ids_of("ab"), ids_of("c")[0]], "stop"), 1.0)
    assert (stream.text, stream.finish, stream.matched) == ("ab", "stop", ids_of("c")[0])
    assert len(stream.ids) == len(ids_of("ab")) + 1
    assert len(ends) == 1


def test_a_stop_string_across_tokens_ends_the_output_at_once():
    stream, ends = make_relay(["lov"])
    ids = [*ids_of("my l"), *ids_of("o"), *ids_of("v"), *ids_of("e")]
    for i, token in enumerate(ids):
        stream.on_tokens(message(i, [token]), 1.0 + i)
    assert (stream.text, stream.finish, stream.matched) == ("my ", "stop", "lov")
    assert stream.ids == ids[:-1]
    assert len(ends) == 1


def test_a_stop_string_inside_a_longer_message_cuts_the_ids_after_it():
    stream, _ = make_relay(["b"])
    stream.on_tokens(message(0, [*ids_of("a"), *ids_of("b"), *ids_of("c")], "length"), 1.0)
    assert (stream.text, stream.ids, stream.finish) == ("a", [*ids_of("a"), *ids_of("b")], "stop")


def test_stop_strings_count_only_after_min_tokens():
    stream, _ = make_relay(["a"], min_tokens=2)
    a = ids_of("a")[0]
    stream.on_tokens(message(0, [a, a, a, a]), 1.0)
    assert (stream.text, len(stream.ids)) == ("aa", 3)


def test_text_held_back_for_a_stop_is_shown_at_the_end():
    stream, _ = make_relay(["abc"])
    stream.on_tokens(message(0, ids_of("xa")), 1.0)
    assert stream.take().text == "x"
    stream.on_tokens(message(len(ids_of("xa")), ids_of("b"), "length"), 2.0)
    delta = stream.take()
    assert (delta.text, delta.is_last) == ("ab", True)


def test_repeated_tokens_are_taken_once():
    stream, _ = make_relay()
    ids = ids_of("Shall I compare")
    stream.on_tokens(message(0, ids[:3]), 1.0)
    stream.on_tokens(message(1, ids[1:5]), 1.0)
    stream.on_tokens(message(0, ids[:2]), 1.0)
    assert stream.ids == ids[:5]


def test_the_first_token_brings_the_cached_tokens():
    stream, _ = make_relay()
    stream.on_tokens(message(1, ids_of("b"), "length"), 3.0)
    assert stream.first_at == 0.0
    stream.on_tokens(message(0, ids_of("a"), cached_tokens=16), 4.0)
    assert (stream.first_at, stream.cached_tokens) == (4.0, 16)


def test_timings_are_those_of_the_stages_before_the_second_token_and_add_up():
    stream, _ = make_relay()
    prefill = (StageSpan("prefill", 10.0, 1.0, 8), StageSpan("prefill_chunk", 10.0, 1.0, 8))
    stream.on_spans(StageReport("p", 0.0, 0.0, prefill))
    decode = (StageSpan("transfer", 5.0, 0.5), StageSpan("transfer", 6.0, 0.25), StageSpan("decode", 7.0, 9.0))
    stream.on_spans(StageReport("d", 0.0, 0.0, decode))
    assert stream.timings == {"prefill_s": 1.0, "transfer_s": 0.75}


def test_an_output_keeps_a_bounded_number_of_reports():
    stream, _ = make_relay()
    for _ in range(MAX_REPORTS + 5):
        stream.on_spans(StageReport("p", 0.0, 0.0, ()))
    assert len(stream.reports) == MAX_REPORTS


def test_an_output_ends_once():
    stream, ends = make_relay()
    stream.on_tokens(message(0, ids_of("a")), 1.0)
    stream.fail(RequestError(ErrorCode.NODE_LOST, "gone"), 2.0)
    stream.fail(RequestError(ErrorCode.ABORTED, "again"), 3.0)
    stream.on_tokens(message(1, ids_of("b"), "length"), 4.0)
    assert stream.error is not None
    assert stream.error.code is ErrorCode.NODE_LOST
    assert (len(ends), stream.ids, stream.finish) == (1, ids_of("a"), "")


def test_an_ended_output_gives_its_last_delta():
    stream, _ = make_relay()
    assert stream.take() is None
    stream.on_tokens(message(0, ids_of("a"), "length"), 1.0)
    delta = stream.take()
    assert (delta.text, delta.ids, delta.first, delta.is_last) == ("a", ids_of("a"), 0, True)


@pytest.mark.parametrize(("after", "finish"), [((), "length"), ((320,), "stop")])
def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(after, finish):
    stream, _ = make_relay()
    half = TEXT._tokenizer.token_to_id("ð")
    stream.on_tokens(message(0, [half, *after], finish), 1.0)
    assert stream.text == "\ufffd"


# ---- reasoning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_open", "num_reasoning"),
    [
        ("(ab)cd", False, 3),  # "(", "a", "b"; the end precedes the answer
        ("ab)cd", True, 2),
        ("ab", True, 2),
        ("(ab)", False, 3),  # nothing follows the end
        ("cd", False, 0),
        ("a(b)c", False, 2),
        ("((", False, 0),
    ],
)
def test_the_tokens_of_the_reasoning_are_counted(text, is_open, num_reasoning):
    ids = ids_of(text)
    assert len(ids) == len(text)
    output_format = OutputFormat(lambda: ToyReasoningParser(TextParser(), is_open=is_open))
    for cut in range(len(ids) + 1):
        request = GenerateRequest("r", "r", (1,), SamplingParams(), output_format=output_format)
        stream = OutputStream(request, 0, lambda: TEXT.detokenizer(skip_special=True), lambda _: None, 0.0)
        if cut:
            stream.on_tokens(message(0, ids[:cut]), 1.0)
        stream.on_tokens(message(cut, ids[cut:], "length"), 1.0)
        assert stream.num_reasoning_tokens == num_reasoning


# ---- tokens of each part ---------------------------------------------------------------------------------------------


class LineParser(TextParser):
    """Holds line breaks back, as parsers do that look for a call behind them."""

    def __init__(self):
        self._held = ""

    def push(self, text, token=None):
        shown = (self._held + text).rstrip("\n")
        self._held = (self._held + text)[len(shown) :]
        return super().push(shown)

    def flush(self):
        return super().push(self._held)


PIECES = (b"", b"a", b".\n\n", b"\n", b"(", b"E", b"ND", b"\xf0")
END = 0


@pytest.mark.parametrize("is_one_message", [False, True])
@pytest.mark.parametrize(
    ("tokens", "finish", "stop", "text", "spans", "num_reasoning"),
    [
        ((1, 2), "", "\n\n", "a.", [(0, 1), (1, 2)], 0),  # the token that completes the stop string begins with text
        ((1, 3, 3), "", "\n\n", "a", [(0, 1)], 0),
        ((4, 1, 2), "", "\n\n", "a.", [], 3),
        ((1, 3, END), "stop", "", "a\n", [(0, 1), (1, 2)], 0),  # the end token is hidden
        ((1, 3, 5, 6), "", "END", "a\n", [(0, 1), (1, 2)], 0),
        ((1, 3, 5, END), "stop", "END", "a\nE", [(0, 1), (1, 3)], 0),
        ((1, 7, END), "stop", "", "a\ufffd", [(0, 1), (1, 2)], 0),
    ],
)
def test_the_tokens_of_a_part_are_those_that_are_shown(
    tokens, finish, stop, text, spans, num_reasoning, is_one_message
):
    output_format = OutputFormat(lambda: ToyReasoningParser(LineParser(), is_open=False))
    stops = (stop,) if stop else ()
    request = GenerateRequest("r", "r", (1,), SamplingParams(logprobs=0), stops=stops, output_format=output_format)
    stream = OutputStream(request, 0, lambda: ByteDetokenizer(PIECES), lambda _: None, 0.0)
    if is_one_message:
        stream.on_tokens(message(0, tokens, finish), 1.0)
    else:
        for i, token in enumerate(tokens):
            stream.on_tokens(message(i, [token], finish if i == len(tokens) - 1 else ""), 1.0)
    assert "".join(piece.text for piece in stream.pieces) == text
    assert [span[1:] for span in stream.text_spans] == spans
    assert stream.num_reasoning_tokens == num_reasoning
    assert (stream.ids, stream.finish) == (list(tokens), "stop")


@pytest.mark.parametrize("min_tokens", [0, 3])
@pytest.mark.parametrize("keeps_stop", [False, True])
def test_a_marker_that_is_a_stop_string_ends_the_output(keeps_stop, min_tokens):
    reasoning, ids = reasoning_format("qwen3", ""), {"<think>": 0, "</think>": 2}
    output_format = OutputFormat(
        lambda: reasoning.parser(TextParser(), is_open=False, token_ids=ids),
        {token: text for text, token in ids.items()},
    )
    sampling = SamplingParams(min_tokens=min_tokens)
    request = GenerateRequest(
        "r", "r", (1,), sampling, stops=("</think>",), keep_stop=keeps_stop, output_format=output_format
    )
    pieces = (b"<think>", b"why", b"</think>", b"so")
    stream = OutputStream(request, 0, lambda: ByteDetokenizer(pieces), lambda _: None, 0.0)
    stream.on_tokens(message(0, (0, 1, 2, 3, 2), "length"), 1.0)
    assert (stream.finish, stream.matched) == ("stop", "</think>")
    if min_tokens:
        assert stream.ids == [0, 1, 2, 3, 2]
        assert stream.text == "<think>why</think>so" + "</think>" * keeps_stop
    else:
        assert stream.ids == [0, 1, 2]
        assert stream.text == "<think>why" + "</think>" * keeps_stop
    assert [piece.text for piece in stream.pieces[:1]] == ["why"]
