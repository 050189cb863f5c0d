"""``traceparent`` is read as W3C Trace Context demands, and everything else is ignored."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tracing.trace_context import TraceContext, parse_traceparent, trace_id_of

TRACE, PARENT, OWN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "0123456789abcdef"


@pytest.mark.parametrize(
    ("value", "is_sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-02", False),  # only the flag that the ids are random
        (f"00-{TRACE}-{PARENT}-ff", True),
        (f"cc-{TRACE}-{PARENT}-01", True),  # a later version
        (f"cc-{TRACE}-{PARENT}-01-what-comes-then", True),
    ],
)
def test_a_valid_header_gives_trace_parent_and_flag(value: str, is_sampled: bool) -> None:
    assert parse_traceparent(value, OWN) == TraceContext(TRACE, PARENT, OWN, is_sampled)


@pytest.mark.parametrize(
    "value",
    [
        "", "00", f"00-{TRACE}-{PARENT}", f"00-{TRACE}-{PARENT}-1", f"00-{TRACE}-{PARENT}-0g",
        f"00-{TRACE}-{PARENT}-01-", f"00-{TRACE}-{PARENT}-01-more", f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{PARENT}-01",
        f"0-{TRACE}-{PARENT}-01", f" 00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01\n", f"00_{TRACE}_{PARENT}_01",
        f"cc-{TRACE}-{PARENT}-01.more", f"00-{TRACE}-{PARENT}-\u06601",
    ],
)  # fmt: skip
def test_an_invalid_header_is_ignored(value: str) -> None:
    assert parse_traceparent(value, OWN) is None


def test_the_answer_names_our_span() -> None:
    context = parse_traceparent(f"00-{TRACE}-{PARENT}-03", OWN)
    assert context is not None
    assert context.traceparent == f"00-{TRACE}-{OWN}-01"
    assert parse_traceparent(context.traceparent, PARENT) == TraceContext(TRACE, OWN, PARENT, True)


def test_the_trace_of_an_untraced_request_is_the_random_part_of_its_id() -> None:
    for request_id in (TRACE, f"cmpl-{TRACE}", f"resp_{TRACE}", f"chatcmpl-{TRACE}-3"):
        assert trace_id_of(request_id) == TRACE


@given(st.text(max_size=64))
def test_every_id_gives_a_valid_trace(request_id: str) -> None:
    trace_id = trace_id_of(request_id)
    assert re.fullmatch("[0-9a-f]{32}", trace_id)
    assert parse_traceparent(f"00-{trace_id}-{PARENT}-01", OWN) is not None
