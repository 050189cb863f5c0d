"""Outputs with given pieces, for tests of formatters, and any division of their pieces into chunks."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from common.sampling_params import SamplingParams
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import Delta, OutputStream
from gateway.text.output_parser import OutputPiece, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin

#: Reasoning, text and two calls.
PIECES = (
    ReasoningPiece("Think."),
    TextPiece("Let me look."),
    ToolCallBegin(0, "f"),
    ToolCallArguments(0, '{"x": 1}'),
    ToolCallBegin(1, "g"),
)


def output_of(
    pieces: Sequence[OutputPiece], *, finish: str = "stop", matched: int | str | None = None, num_tokens: int = 5
) -> OutputStream:
    """An ended output of a prompt of eight tokens, of which three were cached."""
    request = GenerateRequest("rid", "id", tuple(range(8)), SamplingParams(64, temperature=0.5, top_p=0.25), tenant="t")
    output = OutputStream(request, 0, _no_detokenizer, lambda stream: None, 0.0)
    output.ids += range(num_tokens)
    output.pieces += pieces
    output.num_reasoning_tokens = 2
    output.cached_tokens, output.finish, output.matched, output.is_ended = 3, finish, matched, True
    return output


def delta_of(pieces: Sequence[OutputPiece]) -> Delta:
    return Delta("", 0, [], [], False, pieces)


def streamed(formatter: Any, output: OutputStream, chunks: Sequence[Sequence[OutputPiece]]) -> list[dict[str, Any]]:
    """The events of a stream with these chunks. Each name must be the type of its event."""
    data = formatter.first([output])
    data += b"".join(formatter.chunk(output, delta_of(pieces)) for pieces in chunks)
    return events_of(data + formatter.last([output]))


def events_of(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n\n")
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


@st.composite
def divided(draw: st.DrawFn) -> list[list[OutputPiece]]:
    """``PIECES``, each cut anywhere, in chunks of any size."""
    cut: list[OutputPiece] = []
    for piece in PIECES:
        if isinstance(piece, ToolCallBegin):
            cut.append(piece)
            continue
        places = sorted(draw(st.sets(st.integers(1, len(piece.text) - 1), max_size=4)))
        for first, last in zip([0, *places], [*places, len(piece.text)], strict=True):
            text = piece.text[first:last]
            is_arguments = isinstance(piece, ToolCallArguments)
            cut.append(ToolCallArguments(piece.index, text) if is_arguments else type(piece)(text))
    ends = sorted(draw(st.sets(st.integers(1, len(cut) - 1), max_size=6)))
    return [cut[first:last] for first, last in zip([0, *ends], [*ends, len(cut)], strict=True)]


def _no_detokenizer() -> Any:
    raise AssertionError("the pieces are given")
