"""Frames of a permitted peer that is broken: valid, changed and random ones. A mailbox never raises."""

import math
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from support.kv.frame_damage import Change, changes, mangled
from support.wire.message_strategies import TREES, messages_of

from common.sampling_params import SamplingParams
from common.stage_spans import StageSpan
from common.wire.mailbox import Envelope, Mailbox
from common.wire.messages import (
    PROTOCOL_VERSION,
    FromDecode,
    FromGateway,
    FromNode,
    FromPrefill,
    Generate,
    Header,
    Heartbeat,
    Message,
    Resume,
    Spans,
)
from common.wire.process_id import new_incarnation

UNIONS = {"node": FromNode, "gateway": FromGateway, "decode": FromDecode, "prefill": FromPrefill}
PEER = "a" * 32
RIGHT_HEADER = msgspec.msgpack.encode(Header(PROTOCOL_VERSION, PEER, ""))
REASONS = {"frames", "malformed", "version", "sender", "target"}


@pytest.fixture(scope="module")
def boxes() -> Iterator[dict[str, Mailbox]]:
    context: zmq.Context[Any] = zmq.Context()
    made = {
        name: Mailbox(context, new_incarnation(), union, bind="tcp://127.0.0.1:*") for name, union in UNIONS.items()
    }
    yield made
    for box in made.values():
        box.close()
    context.term()


def decoded(box: Mailbox, frames: list[bytes]) -> list[Envelope]:
    """What the mailbox makes of frames; it either delivers messages or counts one drop, for a known reason."""
    before = box.dropped.total()
    found = box._decode(PEER.encode(), frames)
    assert box.dropped.total() == before + (not found)
    assert set(box.dropped) <= REASONS
    assert all(envelope.sender == PEER for envelope in found)
    return found


@pytest.mark.parametrize("name", UNIONS)
@given(data=st.data())
def test_valid_messages_of_every_kind_are_delivered_whole(boxes: dict[str, Mailbox], name: str, data: Any) -> None:
    value = data.draw(messages_of(UNIONS[name]))
    (envelope,) = decoded(boxes[name], [RIGHT_HEADER, msgspec.msgpack.encode(value)])
    assert isinstance(envelope.message, get_args(UNIONS[name]))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(envelope.message), type=UNIONS[name])
    assert repr(again) == repr(envelope.message)  # NaN is not equal to itself


@pytest.mark.parametrize("name", UNIONS)
@given(data=st.data(), damage=changes)
def test_changed_messages_are_dropped_or_are_other_valid_messages(
    boxes: dict[str, Mailbox], name: str, data: Any, damage: list[Change]
) -> None:
    value = data.draw(messages_of(UNIONS[name]))
    for envelope in decoded(boxes[name], mangled([RIGHT_HEADER, msgspec.msgpack.encode(value)], damage)):
        assert isinstance(envelope.message, get_args(UNIONS[name]))


@pytest.mark.parametrize("name", UNIONS)
@given(head=TREES | st.binary(), body=TREES | st.lists(TREES), is_right=st.booleans())
def test_random_messagepack_is_dropped(
    boxes: dict[str, Mailbox], name: str, head: Any, body: Any, is_right: bool
) -> None:
    first = RIGHT_HEADER if is_right else head if isinstance(head, bytes) else msgspec.msgpack.encode(head)
    for envelope in decoded(boxes[name], [first, msgspec.msgpack.encode(body)]):
        assert isinstance(envelope.message, Message)


@pytest.mark.parametrize("name", UNIONS)
@given(frames=st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_are_dropped(boxes: dict[str, Mailbox], name: str, frames: list[bytes]) -> None:
    decoded(boxes[name], frames)


def spans_with(span: StageSpan) -> dict[str, Any]:
    """A message of the type ``Spans``, which cannot be made of a wrong span."""
    return {**msgspec.to_builtins(Spans("r", 0, ())), "spans": [span]}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_instants_and_durations_that_no_clock_has_are_malformed(boxes: dict[str, Mailbox], number: float) -> None:
    """One such number would spoil the sums of histograms and the estimate of a clock for good."""
    heartbeat = Heartbeat(0, 0, 0, 0, 0, {})
    instants = ("sent_at", "gateway_sent_at", "received_at")
    wrong = [
        spans_with(StageSpan("decode", number * 1e11, 1.0)),
        spans_with(StageSpan("decode", 1.0, number)),
        *(msgspec.structs.replace(heartbeat, **{name: number}) for name in instants),
    ]
    for message in wrong:
        assert decoded(boxes["node"], [RIGHT_HEADER, msgspec.msgpack.encode(message)]) == []


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, 1e300])
def test_durations_of_a_request_that_no_clock_has_are_malformed(boxes: dict[str, Mailbox], number: float) -> None:
    generate = Generate("r", 0, (1,), SamplingParams(max_new_tokens=1), prefill=None, decode=None, timeout_s=1.0)
    resume = Resume("r", 0, (1,), timeout_s=1.0)
    told = {"gateway": (generate, ("timeout_s", "waited_s", "slo_ttft_s", "slo_itl_s")),
            "decode": (resume, ("timeout_s", "waited_s"))}  # fmt: skip
    for name, (message, fields) in told.items():
        assert decoded(boxes[name], [RIGHT_HEADER, msgspec.msgpack.encode(message)]) != []
        for field in fields:
            wrong = msgspec.structs.replace(message, **{field: number})
            assert decoded(boxes[name], [RIGHT_HEADER, msgspec.msgpack.encode(wrong)]) == []


@pytest.mark.parametrize("amount", [-1, 1 << 63])
def test_an_amount_that_is_no_count_is_malformed(boxes: dict[str, Mailbox], amount: int) -> None:
    message = spans_with(StageSpan("decode", 1.0, 1.0, amount))
    assert decoded(boxes["node"], [RIGHT_HEADER, msgspec.msgpack.encode(message)]) == []


@pytest.mark.parametrize("field", ["counters", "gauges"])
def test_the_figures_of_a_heartbeat_are_bounded(boxes: dict[str, Mailbox], field: str) -> None:
    heartbeat = Heartbeat(0, 0, 0, 0, 0, {})
    for figures in ({"a" * 129: 1.0}, {str(number): 1.0 for number in range(1_025)}):
        message = msgspec.structs.replace(heartbeat, **{field: figures})
        assert decoded(boxes["node"], [RIGHT_HEADER, msgspec.msgpack.encode(message)]) == []
