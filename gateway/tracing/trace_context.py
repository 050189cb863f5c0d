"""The header ``traceparent`` of W3C Trace Context: read strictly, and written for answers."""

import hashlib
import re
from typing import NamedTuple

_TRACEPARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<parent>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_OWN_ID = re.compile(r"(?!.*0{32})(?:.*[^0-9a-f])?([0-9a-f]{32})(?:-[0-9]+)?", re.DOTALL)
SAMPLED = 1


class TraceContext(NamedTuple):
    """The trace that one HTTP request belongs to.

    Attributes:
        parent_id: the client's span; empty if the trace begins here.
        span_id: our span of the first output; each other output has a span of its own.
        is_sampled: spans are exported.
        operation: what is asked for, as the GenAI semantic conventions name it.
    """

    trace_id: str
    parent_id: str
    span_id: str
    is_sampled: bool
    operation: str = ""

    @property
    def traceparent(self) -> str:
        """The header of the answer, which names our span."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def parse_traceparent(value: str, span_id: str, operation: str = "") -> TraceContext | None:
    """The context of a valid header, with this span of ours; None if the header is invalid, which is ignored.

    A later version may append fields, of which nothing is read.
    """
    found = _TRACEPARENT.fullmatch(value)
    if found is None or (found["version"] == "00" and found["more"]):
        return None
    is_sampled = bool(int(found["flags"], 16) & SAMPLED)
    return TraceContext(found["trace"], found["parent"], span_id, is_sampled, operation)


def trace_id_of(request_id: str) -> str:
    """The trace of a request without a ``traceparent``: the random part of the id of its answer, or a hash of an id
    that the client has chosen. So no further id has to be drawn."""
    found = _OWN_ID.fullmatch(request_id)
    return hashlib.sha256(request_id.encode(errors="replace")).hexdigest()[:32] if found is None else found[1]
