"""The record of a request: one line of ``--jsonl``."""

import itertools

import msgspec

from scripts.load_tester.client.ipc import RequestDone
from scripts.load_tester.client.sse_parser import parse_response
from scripts.load_tester.workload.planned_request import PlannedRequest


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request. Instants are seconds since the start of the run; -1 for an event that never happened.

    Attributes:
        slos: limits of its own, in seconds, which override those of its class.
        ideal_cached: prompt tokens that a perfect prefix cache would have held.
        prompt_digest: identifies the prompt, the same in every run.
        intended_s: when the request should have gone out; headline latencies count from here.
        released_s: when the client turned to it.
        sent_s: when it was written to an open connection.
        stamps_s, counts: instant and number of tokens of each event with output.
        ended_s: when the last byte arrived or the failure happened.
        status: HTTP status; 0 without a response.
        error, message: kind of failure and the server's words about it; empty if it succeeded.
        num_output: output tokens by the server's usage, else as counted.
        num_counted: tokens counted; events where the server does not say how many tokens each has (``has_counts``).
        usage_prompt, usage_output, usage_cached: the server's usage; None without it.
        num_events: events of the stream, including those without output.
        timings: stages timed by the server, by name, in seconds.
        is_measured: whether it is outside of warm-up and cool-down and was not cut off by Ctrl-C.
        is_expected: whether the output equals the expected one; None if none is expected.
    """

    index: int
    class_name: str
    tenant: str
    session: int
    turn: int
    group: int
    priority: int | None
    priority_class: str
    deadline_ms: float | None
    slos: dict[str, float]
    num_input: int
    num_output_asked: int
    ideal_cached: int
    prompt_digest: str
    intended_s: float
    released_s: float
    sent_s: float
    ended_s: float
    stamps_s: list[float]
    counts: list[int]
    has_counts: bool
    status: int
    error: str
    message: str
    finish: str
    num_output: int
    num_counted: int
    usage_prompt: int | None
    usage_output: int | None
    usage_cached: int | None
    num_events: int
    request_id: str
    timings: dict[str, float]
    text: str
    ids: list[int]
    is_retry: bool
    is_measured: bool = True
    is_expected: bool | None = None

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        """From the intended instant to the first token; infinite without one."""
        return self.stamps_s[0] - self.intended_s if self.stamps_s else float("inf")

    @property
    def e2e_s(self) -> float:
        """From the intended instant to the last token."""
        return self.stamps_s[-1] - self.intended_s if self.stamps_s else float("inf")

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first event; None with a single event."""
        rest = self.num_output - self.counts[0] if self.counts else 0
        return (self.stamps_s[-1] - self.stamps_s[0]) / rest if rest > 0 and len(self.stamps_s) > 1 else None

    @property
    def tokens_per_count(self) -> float:
        """Tokens per unit of ``counts``: more than 1 where only the usage tells the number of tokens."""
        return self.num_output / self.num_counted if self.num_counted else 1.0

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.stamps_s)]


def make_record(
    done: RequestDone, planned: PlannedRequest, start_at: float, ideal_cached: int, drawn: str
) -> RequestRecord:
    """Parse a finished request; for ``drawn`` see ``PlannedRequest.digest``."""
    answer = parse_response(done)
    num_counted = sum(answer.counts)
    usage = answer.usage_output
    return RequestRecord(
        index=planned.index,
        class_name=planned.class_name,
        tenant=planned.tenant,
        session=planned.session,
        turn=planned.turn,
        group=planned.group,
        priority=planned.priority,
        priority_class=planned.priority_class,
        deadline_ms=planned.deadline_ms,
        slos=dict(planned.slos),
        num_input=planned.num_input,
        num_output_asked=planned.num_output,
        ideal_cached=ideal_cached,
        prompt_digest=planned.digest(drawn),
        intended_s=done.intended_at - start_at,
        released_s=done.released_at - start_at if done.released_at else -1.0,
        sent_s=done.sent_at - start_at if done.sent_at else -1.0,
        ended_s=done.ended_at - start_at,
        stamps_s=[stamp - start_at for stamp in answer.stamps],
        counts=answer.counts,
        has_counts=answer.has_counts,
        status=answer.status,
        error=answer.error,
        message=answer.message,
        finish=answer.finish,
        num_output=num_counted if usage is None or answer.error else usage,
        num_counted=num_counted,
        usage_prompt=answer.usage_prompt,
        usage_output=usage,
        usage_cached=answer.usage_cached,
        num_events=answer.num_events,
        request_id=answer.request_id,
        timings=answer.timings,
        text=answer.text,
        ids=answer.ids,
        is_retry=done.is_retry,
    )
