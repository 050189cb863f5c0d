"""The clients of a simulated service: they send a planned load and keep the outcome of each request.

In an open loop, sessions start at their planned instants; in a closed loop, a fixed number is always in flight. The
next turn of a session follows the end of the one before it after the planned pause, even if that one has failed.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from common.cache.tree_node import PackedTokens
from common.errors import ConfigError, RequestError
from common.sampling_params import SamplingParams
from common.scheduling.output_length_predictor import OutputLengthPredictor
from gateway.requests.admission.priority import PriorityResolver
from gateway.requests.input.generate_request import GenerateRequest
from scripts.load_tester.analysis.metrics import slo_limits
from scripts.load_tester.workload.plan import Plan
from scripts.load_tester.workload.planned_request import ANSWER, PlannedRequest, Segment, segment_key
from scripts.load_tester.workload.session_sampling import Session
from scripts.simulator.event_queue import EventQueue
from scripts.simulator.service.engine import END_TOKEN
from scripts.simulator.service.gateway import Answer
from scripts.simulator.service.node import MODEL

#: Token ids below this are never part of a prompt or an answer.
FIRST_TOKEN = END_TOKEN + 1
#: Different token ids.
MAX_IDS = 4_096
#: Of the finalizer of MurmurHash3.
SHIFT, FACTOR = np.uint64(33), np.uint64(0xFF51AFD7ED558CCD)


def scaled_places(count: int) -> NDArray[np.uint64]:
    """The numbers from 1 on, each times the golden ratio."""
    return np.arange(1, count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class PlannedTokens:
    """Prompts and answers of a plan as token ids, determined by the seed.

    Later prompts of a session repeat its answers, so that these can be found in a cache. Ids are a hash (the finalizer
    of MurmurHash3) of seed, segment and position, which takes a tenth of the time of a random generator.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._num_ids = np.uint64(min(vocab_size, MAX_IDS) - FIRST_TOKEN)
        self._scaled_places = scaled_places(4096)
        self._lengths: dict[int, int] = {}
        self._answers: dict[int, list[int]] = {}  # both nodes of a request ask for its answer

    def prompt(self, planned: PlannedRequest) -> tuple[int, ...]:
        """The prompt. Nothing asks for most of its ids one by one, so it is kept packed, in place of a tuple."""
        return cast(tuple[int, ...], PackedTokens(self._ids(planned.segments).astype(np.uint32).tobytes()))

    def expect(self, planned: PlannedRequest) -> None:
        """Prepare the answer to a request that is about to be sent."""
        self._lengths[planned.index] = planned.num_output

    def answer(self, index: int) -> Sequence[int]:
        """The answer to a request, by its index in the plan; empty if the request has ended.

        A prefill node that computes a retracted request again has no seed for it, so its engine asks for answer 0 and
        throws the token away.
        """
        if index not in self._lengths:
            return []
        if index not in self._answers:
            self._answers[index] = self._ids([(segment_key(ANSWER, index), self._lengths[index])]).tolist()
        return self._answers[index]

    def forget(self, index: int) -> None:
        self._lengths.pop(index, None)
        self._answers.pop(index, None)

    def _ids(self, segments: Sequence[Segment]) -> NDArray[np.uint64]:
        lengths = [length for _, length in segments]
        if max(lengths, default=0) > len(self._scaled_places):
            self._scaled_places = scaled_places(2 * max(lengths))
        seed = self._seed * 0xD1B54A32D192ED03
        starts = [(number * 0x9E3779B97F4A7C15 + seed) & (1 << 64) - 1 for number, _ in segments]
        values = np.concatenate([self._scaled_places[:length] for length in lengths] or [self._scaled_places[:0]])
        values += np.repeat(np.array(starts, dtype=np.uint64), lengths)
        values ^= values >> SHIFT
        values *= FACTOR
        values ^= values >> SHIFT
        values >>= SHIFT
        values *= self._num_ids  # a product, where `%` takes longer
        values >>= np.uint64(31)
        values += np.uint64(FIRST_TOKEN)
        return values


@dataclass(slots=True)
class Outcome:
    """The outcome of one request; instants in virtual seconds."""

    planned: PlannedRequest
    due_at: float
    stamps_s: list[float] = field(default_factory=list)
    extra: dict[int, int] = field(default_factory=dict)  # as in ``Answer``
    ended_at: float = -1.0
    error: str = ""
    cached_tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return not self.error and self.ended_at >= 0.0

    @property
    def num_output(self) -> int:
        return len(self.stamps_s) + sum(self.extra.values())

    @property
    def ttft_s(self) -> float:
        """From the due instant to the first token; infinite without one."""
        return self.stamps_s[0] - self.due_at if self.stamps_s else float("inf")

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first message; None with a single message."""
        stamps, num_first = self.stamps_s, 1 + self.extra.get(0, 0)
        return (stamps[-1] - stamps[0]) / (self.num_output - num_first) if len(stamps) > 1 else None


def priority_class_of(planned: PlannedRequest, classes: Collection[str]) -> str | None:
    """The priority class that a request names, or the one with the name of its request class; None for none."""
    return planned.priority_class or (planned.class_name if planned.class_name in classes else None)


class Client:
    """Sends the requests of a plan.

    Args:
        submit: sends a request, or raises RequestError.
        classes: names of the priority classes.
        max_new_tokens: the same limit for every request; None for the planned length of each.
        concurrency: sessions in flight in a closed loop; 0 in an open loop.
    """

    def __init__(
        self,
        plan: Plan,
        script: PlannedTokens,
        events: EventQueue,
        submit: Callable[[GenerateRequest], Answer],
        *,
        priorities: PriorityResolver,
        classes: Collection[str] = (),
        max_new_tokens: int | None = None,
        timeout_s: float = 600.0,
        slos: dict[str, float] | None = None,
        concurrency: int = 0,
    ) -> None:
        self._plan = plan
        self._script = script
        self._events = events
        self._submit = submit
        self._priorities = priorities
        self._classes = classes
        self._predictor = OutputLengthPredictor()
        self._max_new_tokens = max_new_tokens
        self._timeout_s = timeout_s
        self._slos = slos or {}
        self._concurrency = concurrency
        self._sessions: Iterator[Session] = iter(plan.sessions)
        self._in_flight: dict[str, tuple[Outcome, Session, int]] = {}
        self.outcomes: list[Outcome] = []
        self.num_ended = 0
        self._num_expected = 0  # sessions that have not ended

    @property
    def is_done(self) -> bool:
        return self._num_expected == 0

    def start(self) -> None:
        for _ in range(self._concurrency or 1):
            self._next_session()

    def _next_session(self) -> None:
        session = next(self._sessions, None)
        if session is None:
            return
        now = self._events.now()
        due_at = session[0].at if self._plan.is_open else now
        if not self._plan.is_open and self._plan.seconds is not None and now >= self._plan.seconds:
            return
        self._num_expected += 1
        self._events.at(due_at, self._arrive, session)

    def _arrive(self, session: Session) -> None:
        if self._plan.is_open:
            self._next_session()
        self._send(session, 0)

    def _send(self, session: Session, turn: int) -> None:
        planned = session[turn]
        outcome = Outcome(planned, self._events.now())
        self.outcomes.append(outcome)
        rid = f"r{planned.index}"
        self._script.expect(planned)
        self._in_flight[rid] = (outcome, session, turn)
        try:
            self._submit(self._request(rid, planned))
        except RequestError as error:
            outcome.error = error.code.value
            self._over(rid)

    def _request(self, rid: str, planned: PlannedRequest) -> GenerateRequest:
        """The request as the gateway parses it.

        Raises RequestError: its class is unknown. Raises ConfigError: its prompt is text.
        """
        is_known = self._max_new_tokens is None
        prompt = self._script.prompt(planned)
        if not prompt:
            raise ConfigError("--trace: a line has a text without input_length; the simulator needs numbers of tokens")
        sampling = SamplingParams(
            max_new_tokens=self._max_new_tokens or planned.num_output,
            temperature=0.0,
            seed=planned.index,
            ignore_eos=is_known,
        )
        name = priority_class_of(planned, self._classes)
        expected = planned.num_output if is_known else self._predictor.expected(planned.tenant, prompt)
        limits = slo_limits(planned, self._slos, self._plan.classes)
        request = GenerateRequest(
            rid,
            rid,
            prompt,
            sampling,
            model=MODEL,
            tenant=planned.tenant,
            expected_output=min(expected, sampling.max_new_tokens),
            timeout_s=self._timeout_s if planned.deadline_ms is None else planned.deadline_ms / 1e3,
            slo_ttft_s=limits.get("ttft", 0.0),
            slo_itl_s=limits.get("itl", 0.0),
        )
        return self._priorities.assign([request], planned.priority, name)[0]

    def ended(self, answer: Answer) -> None:
        outcome = self._in_flight[answer.request.rid][0]
        outcome.error = answer.error.code.value if answer.error else ""
        outcome.stamps_s, outcome.extra = answer.stamps_s, answer.extra
        outcome.cached_tokens = answer.cached_tokens
        outcome.timings = answer.timings
        if answer.finish and self._max_new_tokens is not None:
            request = answer.request
            self._predictor.learn(request.tenant, request.prompt, len(answer.ids), is_cut=answer.finish == "length")
        self._over(answer.request.rid)

    def _over(self, rid: str) -> None:
        outcome, session, turn = self._in_flight.pop(rid)
        outcome.ended_at = self._events.now()
        self._script.forget(outcome.planned.index)
        self.num_ended += 1
        if turn + 1 < len(session):
            self._events.after(max(0.0, session[turn + 1].think_s), self._send, session, turn + 1)
            return
        self._num_expected -= 1
        if not self._plan.is_open:
            self._next_session()
