"""The clients of a simulated service: they send a planned load, and keep what became of each request.

In an open loop, sessions begin at their instants, whatever the service does; in a closed loop so many are always under
way. A session's next turn comes after the answer and the pause that is planned for it; after a failure none comes.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.errors import ErrorCode, RequestError
from common.sampling_params import SamplingParams
from common.scheduling.output_length_predictor import OutputLengthPredictor
from gateway.requests.output_processor import GenerateRequest
from gateway.requests.priority import PriorityResolver
from scripts.load_tester.workload.plan import ANSWER, Piece, Planned, key
from scripts.load_tester.workload.session_sampling import Chain
from scripts.load_tester.workload.workload import Plan
from scripts.simulator.engine import END_TOKEN
from scripts.simulator.event_queue import Agenda
from scripts.simulator.gateway import Answer
from scripts.simulator.node import MODEL

#: Token ids below this are never part of a prompt or an answer.
FIRST_TOKEN = END_TOKEN + 1


class Script:
    """Prompts and answers of a plan, as token ids: the same for one seed, equal pieces equal.

    A session's answers are those that its later prompts repeat, so that they can be found in a cache. Ids come out of a
    mixer (the finalizer of MurmurHash3) over seed, piece and place, which takes a tenth of the time that drawing takes.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._interned = np.array(range(vocab_size), dtype=object)  # each id once, however often it occurs
        self._places = np.arange(1, 4096, dtype=np.uint64)
        self._lengths: dict[int, int] = {}

    def prompt(self, planned: Planned) -> tuple[int, ...]:
        tokens: list[int] = []
        for piece in planned.pieces:
            tokens += self._tokens(piece)
        return tuple(tokens)

    def expect(self, planned: Planned) -> None:
        """This request is under way; its answer will be asked for."""
        self._lengths[planned.index] = planned.num_output

    def answer(self, index: int) -> Sequence[int]:
        """What is said to the request of this number in the plan."""
        return self._tokens((key(ANSWER, index), self._lengths[index]))

    def forget(self, index: int) -> None:
        """It has ended."""
        self._lengths.pop(index, None)

    def _tokens(self, piece: Piece) -> list[int]:
        number, length = piece
        if length > len(self._places):
            self._places = np.arange(1, 2 * length, dtype=np.uint64)
        start = (number * 0x9E3779B97F4A7C15 + self._seed * 0xD1B54A32D192ED03) & (1 << 64) - 1
        values = self._places[:length] * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
        values ^= values >> np.uint64(33)
        values *= np.uint64(0xFF51AFD7ED558CCD)
        values ^= values >> np.uint64(33)
        ids = FIRST_TOKEN + values % np.uint64(self._vocab_size - FIRST_TOKEN)
        tokens: list[int] = self._interned[ids.astype(np.intp)].tolist()
        return tokens


@dataclass(slots=True)
class Outcome:
    """What became of one request; instants in virtual seconds."""

    planned: Planned
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


class Client:
    """Args:
    ask: sends a request out, or raises RequestError.
    claims: what requests may claim; a class of the plan that is a priority class claims that.
    classes: the priority classes.
    context_length: of prompt and output together; longer requests are turned away.
    max_new_tokens: what every request allows itself; None for exactly what it is going to need.
    timeout_s: of requests without a deadline.
    """

    def __init__(
        self,
        plan: Plan,
        script: Script,
        agenda: Agenda,
        ask: Callable[[GenerateRequest], Answer],
        *,
        claims: PriorityResolver,
        classes: Collection[str] = (),
        context_length: int,
        max_new_tokens: int | None = None,
        timeout_s: float = 600.0,
        concurrency: int = 0,
    ) -> None:
        self._plan = plan
        self._script = script
        self._agenda = agenda
        self._ask = ask
        self._claims = claims
        self._classes = classes
        self._context_length = context_length
        self._predictor = OutputLengthPredictor()
        self._max_new_tokens = max_new_tokens
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._chains: Iterator[Chain] = iter(plan.chains)
        self._under_way: dict[str, tuple[Outcome, Chain, int]] = {}
        self.outcomes: list[Outcome] = []
        self.num_ended = 0
        self._num_expected = 0  # turns that are still to come

    @property
    def is_done(self) -> bool:
        """Nothing is under way, and nothing is to come."""
        return self._num_expected == 0

    def start(self) -> None:
        """Put the first arrivals on the agenda."""
        for _ in range(self._concurrency or 1):
            self._next_chain()

    def _next_chain(self) -> None:
        chain = next(self._chains, None)
        if chain is None:
            return
        now = self._agenda.now()
        due_at = chain[0].at if self._plan.is_open else now
        if not self._plan.is_open and self._plan.seconds is not None and now >= self._plan.seconds:
            return
        self._num_expected += 1
        self._agenda.at(due_at, self._arrive, chain)

    def _arrive(self, chain: Chain) -> None:
        if self._plan.is_open:
            self._next_chain()
        self._send(chain, 0)

    def _send(self, chain: Chain, turn: int) -> None:
        planned = chain[turn]
        outcome = Outcome(planned, self._agenda.now())
        self.outcomes.append(outcome)
        rid = f"r{planned.index}"
        self._script.expect(planned)
        self._under_way[rid] = (outcome, chain, turn)
        try:
            self._ask(self._asked(rid, planned))
        except RequestError as error:
            outcome.error = error.code.value
            self._over(rid)

    def _asked(self, rid: str, planned: Planned) -> GenerateRequest:
        """As the gateway understands it. Raises RequestError: it claims what it may not."""
        is_known = self._max_new_tokens is None
        prompt = self._script.prompt(planned)
        sampling = SamplingParams(
            max_new_tokens=self._max_new_tokens or planned.num_output,
            temperature=0.0,
            seed=planned.index,
            ignore_eos=is_known,
        )
        if len(prompt) + sampling.max_new_tokens > self._context_length:
            raise RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt and output are longer than the context")
        name = planned.class_name if planned.class_name in self._classes else None
        claim = self._claims.claim(planned.tenant, planned.priority, name)
        expected = planned.num_output if is_known else self._predictor.expected(claim.tenant, prompt)
        ask = GenerateRequest(
            rid,
            rid,
            prompt,
            sampling,
            model=MODEL,
            priority=claim.priority,
            is_priority_named=claim.is_named,
            priority_class=claim.priority_class,
            tenant=claim.tenant,
            expected_output=min(expected, sampling.max_new_tokens),
            timeout_s=self._timeout_s if planned.deadline_ms is None else planned.deadline_ms / 1e3,
        )
        return self._claims.judged([ask])[0]

    def ended(self, answer: Answer) -> None:
        """To be called when an answer is over."""
        outcome = self._under_way[answer.ask.rid][0]
        outcome.error = answer.error.code.value if answer.error else ""
        outcome.stamps_s, outcome.extra = answer.stamps_s, answer.extra
        outcome.cached_tokens = answer.cached_tokens
        outcome.timings = answer.timings
        if answer.finish:
            ask = answer.ask
            self._predictor.learn(ask.tenant, ask.prompt, len(answer.ids), is_cut=answer.finish == "length")
        self._over(answer.ask.rid)

    def _over(self, rid: str) -> None:
        outcome, chain, turn = self._under_way.pop(rid)
        outcome.ended_at = self._agenda.now()
        self._script.forget(outcome.planned.index)
        self.num_ended += 1
        if outcome.is_ok and turn + 1 < len(chain):
            self._agenda.after(max(0.0, chain[turn + 1].think_s), self._send, chain, turn + 1)
            return
        self._num_expected -= 1
        if not self._plan.is_open:
            self._next_chain()
