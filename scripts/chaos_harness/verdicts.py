"""What a run found, and whether each invariant holds: pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scripts.chaos_harness.answers import Answer, Verdict, judge, num_agreeing
from scripts.chaos_harness.pauses import Stream, quantiles
from scripts.chaos_harness.workload import LoadRequest

MAX_EXAMPLES = 10
#: Descriptors that a process may have open at the end beyond those that it had before the faults.
SPARE_DESCRIPTORS = 8


@dataclass(slots=True)
class Tally:
    """Counts of answers, and the first answers that were not as they should be.

    Attributes:
        is_exact: every answer must equal its reference.
        num_resent: times that a request was sent to another gateway, since the one that had it was killed.
        num_agreeing, num_tokens: tokens of complete answers before the first that differs from the reference, and all.
    """

    is_exact: bool = True
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    num_resent: int = 0
    num_agreeing: int = 0
    num_tokens: int = 0

    @property
    def num_sent(self) -> int:
        """Requests that were accepted; a refused one is sent again."""
        return self.verdicts.total() - self.verdicts[Verdict.REFUSED]

    def add(self, request: LoadRequest, answer: Answer, reference: Answer) -> Verdict:
        verdict, why = judge(answer, reference, is_exact=self.is_exact)
        self.verdicts[verdict] += 1
        if verdict in (Verdict.EQUAL, Verdict.ROUNDED):
            agreeing, total = num_agreeing(answer, reference)
            self.num_agreeing += agreeing
            self.num_tokens += total
        if answer.code:
            self.errors[answer.code] += 1
        if verdict not in (Verdict.EQUAL, Verdict.ROUNDED, Verdict.REFUSED) and len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"request {request.number} ({request.kind}) {verdict.value}: {why}")
        if len(answer.stamps) > 1:
            self.streams.append(Stream(answer.stamps, answer.ended_at))
        return verdict


@dataclass(frozen=True)
class Findings:
    """What a run found, beside the answers.

    Attributes:
        pages: what each node still holds when idle, by name; only nodes that hold something.
        failed_checks: invariants that nodes found broken, by name.
        crashes: processes that ended without a fault.
        left: processes, files, sockets and ports that are left at the end.
        descriptors: by name, those open before the faults and at the end.
        problems: what faults and the end of the run found wrong.
        pauses: longest gaps of streams in flight, by the name of the fault.
        marks: longest pause, p99, by the name of the fault; only kinds with a mark.
        num_recovered: further attempts that the gateways have made.
        load_s: how long the load took.
        switches_s: how long pairs whose connections were reset or fell silent took to go on by another transport, from
            when a node noticed.
        since_faults_s: the same from the fault, with the time until a page was to be sent.
    """

    pages: Mapping[str, str] = field(default_factory=dict)
    failed_checks: Mapping[str, int] = field(default_factory=dict)
    crashes: Sequence[str] = ()
    left: Sequence[str] = ()
    descriptors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    problems: Sequence[str] = ()
    pauses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    marks: Mapping[str, float] = field(default_factory=dict)
    num_recovered: int = 0
    load_s: float = 0.0
    switches_s: Sequence[float] = ()
    since_faults_s: Sequence[float] = ()


def broken_invariants(tally: Tally, found: Findings) -> list[str]:
    """A sentence for each invariant that does not hold."""
    counted = [
        (Verdict.WRONG, "answers are wrong"),
        (Verdict.LOST, "requests are lost: their connection ended without an answer"),
        (Verdict.FAILED, "accepted requests ended with an error"),
        (Verdict.HANGING, "requests hang"),
    ]
    broken = [f"{tally.verdicts[verdict]} {what}" for verdict, what in counted if tally.verdicts[verdict]]
    broken += [f"{name} leaks while idle: {what}" for name, what in found.pages.items()]
    broken += [f"{count} checks failed on {name}" for name, count in found.failed_checks.items() if count]
    broken += [f"crashed: {crash}" for crash in found.crashes]
    broken += [f"left behind: {what}" for what in found.left]
    for name, (before, after) in found.descriptors.items():
        if after > before + SPARE_DESCRIPTORS:
            broken.append(f"{name} has {after} descriptors open, {before} before the faults")
    return broken + list(found.problems)


def long_pauses(found: Findings) -> list[str]:
    """A sentence for each kind of fault whose pauses are longer than its mark."""
    broken = []
    for name, mark_s in found.marks.items():
        gaps_s = found.pauses.get(name)
        if gaps_s and (p99 := quantiles(gaps_s)[1]) > mark_s:
            broken.append(f"pauses at {name}: p99 {p99:.2f} s, the mark is {mark_s:g} s")
    return broken


def held(row: Mapping[str, object]) -> str:
    """What a node holds according to its row of ``/v1/workers``; empty if it is idle and holds nothing."""
    heartbeat, register = row.get("heartbeat"), row["register"]
    if not isinstance(heartbeat, Mapping) or not isinstance(register, Mapping):
        return "no heartbeat"
    missing = register["num_pages"] - heartbeat["num_free_pages"] - heartbeat["num_cached_pages"]
    numbers = {
        "waiting": heartbeat["num_waiting"],
        "running": heartbeat["num_running"],
        "quarantined pages": heartbeat["num_quarantined_pages"],
        "missing pages": missing,
        "tokens of load at the gateway": row["load_tokens"],
    }
    return ", ".join(f"{count} {what}" for what, count in numbers.items() if count)
