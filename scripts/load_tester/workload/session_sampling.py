"""Draws the sessions of a plan: classes, turns, lengths, pauses, groups and tenants, as columns.

Each column of each class has its own random stream, so a session does not change with the number of sessions drawn
after it. A million sessions are drawn in 0.1 s; requests are made from the columns when they are needed.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from scripts.load_tester.workload.planned_request import (
    ANSWER,
    GROUP,
    MAX_GROUPS,
    TURN,
    UNIQUE,
    PlannedRequest,
    Segment,
    segment_key,
)
from scripts.load_tester.workload.request_classes import RequestClass
from scripts.load_tester.workload.schedule import MAX_REQUESTS, Floats

Session = list[PlannedRequest]
Ints = NDArray[np.int32]
SLICE = 1024  # sessions converted to Python's integers at a time
EARLY_SESSIONS, EARLY_REQUESTS = 250_000, 2_000_000  # drawn at once for an endless plan
ARRIVALS, SAMPLING, JITTER = range(3)  # streams of the seed
#: Streams of SAMPLING; all but CLASS and TENANT are by class.
CLASS, TURNS, INPUT, OUTPUT, THINK, PREFIX, TENANT = range(7)


def make_rng(seed: int, *stream: int) -> np.random.Generator:
    """Independent generator for each stream of a seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


@dataclass(frozen=True, slots=True)
class SessionColumns:
    """Sessions and their requests.

    Attributes:
        session: number of the first session.
        request_class, group, tenant: by session, the numbers of its class, group and tenant; -1 for none.
        first: by session, the number of its first request; one more entry for the session after the last.
        num_input, num_output: by request, its own tokens without those of earlier turns.
        think_s: by request, the pause before it; no meaning for first turns.
    """

    session: int
    request_class: Ints
    group: Ints
    tenant: Ints
    first: NDArray[np.int64]
    num_input: Ints
    num_output: Ints
    think_s: Floats


class SessionSampler:
    """Draws sessions in order.

    Args:
        tenants: number of tenants for classes without a tenant of their own; 0 for none.
    """

    def __init__(self, seed: int, classes: dict[str, RequestClass], tenants: int) -> None:
        self._classes = list(classes.values())
        self._tenants = tenants
        self._num_sessions = self._num_requests = 0
        purposes = (TURNS, INPUT, OUTPUT, THINK, PREFIX)
        self._rngs = {
            (purpose, n): make_rng(seed, SAMPLING, purpose, n) for purpose in purposes for n in range(len(classes))
        }
        self._rngs |= {(purpose, 0): make_rng(seed, SAMPLING, purpose) for purpose in (CLASS, TENANT)}

    def take(self, count: int, most: int | None = None) -> SessionColumns:
        """Draw the next ``count`` sessions. Raises ConfigError: they have more than ``most`` requests."""
        request_class = self._choose(count)
        turns = self._by_class(TURNS, request_class, lambda request_class, rng, n: request_class.turns.draw(rng, n))
        num_requests = int(turns.sum())
        if most is not None and num_requests > most:
            raise ConfigError(f"{num_requests:,} requests are too many to plan ({most:,} are the most): lower --turns")
        owner = (
            np.repeat(request_class, turns)
            if len(self._classes) > 1
            else np.broadcast_to(request_class[:1], num_requests)
        )
        first = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(turns, out=first[1:])
        columns = SessionColumns(
            self._num_sessions,
            request_class,
            self._by_class(PREFIX, request_class, _groups),
            self._draw_tenants(count),
            first + self._num_requests,
            self._by_class(INPUT, owner, lambda request_class, rng, n: request_class.input_len.draw(rng, n)),
            self._by_class(OUTPUT, owner, lambda request_class, rng, n: request_class.output_len.draw(rng, n)),
            self._by_class(THINK, owner, _thinks, np.float64),
        )
        self._num_sessions += count
        self._num_requests += num_requests
        return columns

    def _choose(self, count: int) -> Ints:
        if len(self._classes) == 1:
            return np.broadcast_to(np.int32(0), count)
        shares = np.array([request_class.share for request_class in self._classes])
        shares /= shares.max()
        return self._rngs[CLASS, 0].choice(len(shares), count, p=shares / shares.sum()).astype(np.int32)

    def _by_class(
        self,
        purpose: int,
        classes: Ints,
        draw: Callable[[RequestClass, np.random.Generator, int], NDArray[Any]],
        dtype: type = np.int32,
    ) -> NDArray[Any]:
        """Draw one value for each entry of ``classes``, from the stream of its class."""
        if len(self._classes) == 1:
            return draw(self._classes[0], self._rngs[purpose, 0], len(classes)).astype(dtype, copy=False)
        found: NDArray[Any] = np.empty(len(classes), dtype)
        for number, request_class in enumerate(self._classes):
            here = np.flatnonzero(classes == number)
            found[here] = draw(request_class, self._rngs[purpose, number], len(here))
        return found

    def _draw_tenants(self, count: int) -> Ints:
        if not self._tenants:
            return np.broadcast_to(np.int32(-1), count)
        return self._rngs[TENANT, 0].integers(0, self._tenants, count).astype(np.int32)


def _groups(request_class: RequestClass, rng: np.random.Generator, count: int) -> NDArray[Any]:
    if not request_class.prefix_len:
        return np.broadcast_to(np.int32(-1), count)
    return rng.integers(0, request_class.prefix_groups, count)


def _thinks(request_class: RequestClass, rng: np.random.Generator, count: int) -> NDArray[Any]:
    if not request_class.think_s:
        return np.broadcast_to(np.float64(0), count)
    return rng.exponential(request_class.think_s, count)


class SampledSessions:
    """The sessions of a plan as requests; every iteration yields the same.

    Args:
        count: number of sessions; None for an endless plan, which draws more whenever the first ones are used up.
        at: instants of the first turns.

    Raises ConfigError: the sessions have more than ``MAX_REQUESTS`` requests.
    """

    def __init__(
        self, seed: int, classes: dict[str, RequestClass], tenants: int, *, count: int | None, at: Floats | None = None
    ) -> None:
        self._classes = list(classes.values())
        self._sampler = SessionSampler(seed, classes, tenants)
        self._at = at
        self._more = 0 if count is not None else early_sessions(self._classes)
        self._columns = [
            self._sampler.take(self._more if count is None else count, None if self._more else MAX_REQUESTS)
        ]

    @property
    def num_requests(self) -> int | None:
        """Requests of all sessions; None for an endless plan."""
        return None if self._more else len(self._columns[0].num_input)

    def __iter__(self) -> Iterator[Session]:
        for number in itertools.count():
            if number == len(self._columns):
                if not self._more:
                    return
                self._columns.append(self._sampler.take(self._more))
            columns = self._columns[number]
            for begin in range(0, len(columns.request_class), SLICE):
                yield from self._made(columns, begin, min(begin + SLICE, len(columns.request_class)))

    def _made(self, columns: SessionColumns, begin: int, end: int) -> Iterator[Session]:
        firsts = columns.first[begin : end + 1].tolist()
        base = int(columns.first[0])
        requests = slice(firsts[0] - base, firsts[-1] - base)
        of_turns = (columns.num_input, columns.num_output, columns.think_s)
        turns = list(zip(*(column[requests].tolist() for column in of_turns), strict=True))
        of_sessions = (columns.request_class, columns.group, columns.tenant)
        facts = zip(*(column[begin:end].tolist() for column in of_sessions), strict=True)
        instants = [0.0] * (end - begin) if self._at is None else self._at[begin:end].tolist()
        rows = zip(itertools.pairwise(firsts), facts, instants, strict=True)
        for session, ((index, after), (request_class, group, tenant), at) in enumerate(rows, columns.session + begin):
            own = turns[index - firsts[0] : after - firsts[0]]
            first = _first(index, at, self._classes[request_class], group, tenant)
            first.session = session if len(own) > 1 else -1
            if group >= 0:
                first.segments = (
                    (segment_key(GROUP, request_class * MAX_GROUPS + group), self._classes[request_class].prefix_len),
                )
            yield _turns_of(first, own)


def _first(index: int, at: float, request_class: RequestClass, group: int, tenant: int) -> PlannedRequest:
    """First request of a session, with the fields that later turns share."""
    return PlannedRequest(
        index,
        at,
        (),
        0,
        request_class.name,
        request_class.tenant or (f"tenant-{tenant}" if tenant >= 0 else ""),
        group=group,
        priority=request_class.priority,
        deadline_ms=request_class.deadline_ms,
        priority_class=request_class.priority_class,
    )


def _turns_of(first: PlannedRequest, turns: list[tuple[int, int, float]]) -> Session:
    """All requests of a session; each prompt has the earlier turns and their responses."""
    (num_input, first.num_output, _), *later = turns
    first.turns_left = len(later)
    segments: list[Segment] = [*first.segments, (segment_key(TURN if later else UNIQUE, first.index), num_input)]
    first.segments = tuple(segments)
    session = [first]
    for turn, (num_input, num_output, think_s) in enumerate(later, 1):
        index = first.index + turn
        segments += ((segment_key(ANSWER, index - 1), session[-1].num_output), (segment_key(TURN, index), num_input))
        session.append(
            PlannedRequest(
                index,
                0.0,
                tuple(segments),
                num_output,
                first.class_name,
                first.tenant,
                session=first.session,
                turn=turn,
                turns_left=len(later) - turn,
                think_s=think_s,
                group=first.group,
                priority=first.priority,
                deadline_ms=first.deadline_ms,
                priority_class=first.priority_class,
            )
        )
    return session


def early_sessions(classes: list[RequestClass]) -> int:
    """Sessions of an endless plan to draw at once: fewer if each has many turns."""
    turns = max(request_class.turns.mean for request_class in classes)
    return max(1, min(EARLY_SESSIONS, int(EARLY_REQUESTS / turns)))
