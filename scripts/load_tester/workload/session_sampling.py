"""Drawn sessions: classes, turns, lengths, pauses, groups and tenants of a whole plan, in columns, before it starts.

Each thing of each class is drawn session by session from a stream of the seed of its own. So neither how many sessions
are drawn, nor in how many goes, changes any of them, and all of a plan are drawn at once, a million in 0.1 s. Requests
are made of the columns when somebody asks for them, which draws nothing.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from scripts.load_tester.workload.plan import ANSWER, GROUP, MAX_GROUPS, TURN, UNIQUE, Piece, Planned, key
from scripts.load_tester.workload.request_classes import Kind
from scripts.load_tester.workload.schedule import MAX_REQUESTS, Floats

Chain = list[Planned]
Ints = NDArray[np.int32]
SLICE = 1024  # sessions turned into Python's own numbers at a time
EARLY_SESSIONS, EARLY_REQUESTS = 250_000, 2_000_000  # of an endless plan, drawn at once
ARRIVALS, DRAWS, JITTER = range(3)  # streams of the seed
KIND, TURNS, INPUT, OUTPUT, THINK, PREFIX, TENANT = range(7)  # streams of DRAWS, all but two of them by class


def rng_of(seed: int, *stream: int) -> np.random.Generator:
    """A generator of its own for each purpose."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


@dataclass(frozen=True, slots=True)
class Columns:
    """Sessions, and the requests that are their turns.

    Attributes:
        session: number of the first of these sessions.
        kind, group, tenant: of each session, the number of its class, of its group and of its tenant; -1 for none.
        first: number of each session's first request, and after them that of the next session to come.
        num_input, num_output: of each request, tokens without what came before.
        think_s: of each request, the pause before it; of first turns it says nothing.
    """

    session: int
    kind: Ints
    group: Ints
    tenant: Ints
    first: NDArray[np.int64]
    num_input: Ints
    num_output: Ints
    think_s: Floats


class Draws:
    """Draws sessions one after another, as often as it is asked.

    Args:
        tenants: among which sessions of classes without a tenant are drawn; 0 for none.
    """

    def __init__(self, seed: int, kinds: dict[str, Kind], tenants: int) -> None:
        self._kinds = list(kinds.values())
        self._tenants = tenants
        self._num_sessions = self._num_requests = 0
        purposes = (TURNS, INPUT, OUTPUT, THINK, PREFIX)
        self._rngs = {(purpose, n): rng_of(seed, DRAWS, purpose, n) for purpose in purposes for n in range(len(kinds))}
        self._rngs |= {(purpose, 0): rng_of(seed, DRAWS, purpose) for purpose in (KIND, TENANT)}

    def take(self, count: int, most: int | None = None) -> Columns:
        """The next ``count`` sessions.

        Raises:
            ConfigError: they come to more than ``most`` requests.
        """
        kind = self._choose(count)
        turns = self._by_kind(TURNS, kind, lambda kind, rng, n: kind.turns.draw(rng, n))
        num_requests = int(turns.sum())
        if most is not None and num_requests > most:
            raise ConfigError(f"{num_requests:,} requests are too many to plan ({most:,} are the most): lower --turns")
        owner = np.repeat(kind, turns) if len(self._kinds) > 1 else np.broadcast_to(kind[:1], num_requests)
        first = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(turns, out=first[1:])
        columns = Columns(
            self._num_sessions,
            kind,
            self._by_kind(PREFIX, kind, _groups),
            self._drawn_tenants(count),
            first + self._num_requests,
            self._by_kind(INPUT, owner, lambda kind, rng, n: kind.input_len.draw(rng, n)),
            self._by_kind(OUTPUT, owner, lambda kind, rng, n: kind.output_len.draw(rng, n)),
            self._by_kind(THINK, owner, _thinks, np.float64),
        )
        self._num_sessions += count
        self._num_requests += num_requests
        return columns

    def _choose(self, count: int) -> Ints:
        if len(self._kinds) == 1:
            return np.broadcast_to(np.int32(0), count)
        shares = np.array([kind.share for kind in self._kinds])
        shares /= shares.max()
        return self._rngs[KIND, 0].choice(len(shares), count, p=shares / shares.sum()).astype(np.int32)

    def _by_kind(
        self,
        purpose: int,
        kinds: Ints,
        draw: Callable[[Kind, np.random.Generator, int], NDArray[Any]],
        dtype: type = np.int32,
    ) -> NDArray[Any]:
        """One value for each entry of ``kinds``, those of each class in order from a stream of its own."""
        if len(self._kinds) == 1:
            return draw(self._kinds[0], self._rngs[purpose, 0], len(kinds)).astype(dtype, copy=False)
        found: NDArray[Any] = np.empty(len(kinds), dtype)
        for number, kind in enumerate(self._kinds):
            here = np.flatnonzero(kinds == number)
            found[here] = draw(kind, self._rngs[purpose, number], len(here))
        return found

    def _drawn_tenants(self, count: int) -> Ints:
        if not self._tenants:
            return np.broadcast_to(np.int32(-1), count)
        return self._rngs[TENANT, 0].integers(0, self._tenants, count).astype(np.int32)


def _groups(kind: Kind, rng: np.random.Generator, count: int) -> NDArray[Any]:
    return rng.integers(0, kind.prefix_groups, count) if kind.prefix_len else np.broadcast_to(np.int32(-1), count)


def _thinks(kind: Kind, rng: np.random.Generator, count: int) -> NDArray[Any]:
    return rng.exponential(kind.think_s, count) if kind.think_s else np.broadcast_to(np.float64(0), count)


class Sessions:
    """A plan's drawn sessions as chains of requests: any number of times, the same each time.

    Args:
        count: how many there are; None for no end. Then some hundred thousand are drawn now, and as many again, from
            the same streams, whenever these are used up.
        at: instants of the first turns.

    Raises:
        ConfigError: they come to too many requests.
    """

    def __init__(
        self, seed: int, kinds: dict[str, Kind], tenants: int, *, count: int | None, at: Floats | None = None
    ) -> None:
        self._kinds = list(kinds.values())
        self._draws = Draws(seed, kinds, tenants)
        self._at = at
        self._more = 0 if count is not None else early_sessions(self._kinds)
        self._columns = [self._draws.take(self._more if count is None else count, None if self._more else MAX_REQUESTS)]

    @property
    def num_requests(self) -> int | None:
        """All turns of all of them; None if there is no end."""
        return None if self._more else len(self._columns[0].num_input)

    def __iter__(self) -> Iterator[Chain]:
        for number in itertools.count():
            if number == len(self._columns):
                if not self._more:
                    return
                self._columns.append(self._draws.take(self._more))
            columns = self._columns[number]
            for begin in range(0, len(columns.kind), SLICE):
                yield from self._made(columns, begin, min(begin + SLICE, len(columns.kind)))

    def _made(self, columns: Columns, begin: int, end: int) -> Iterator[Chain]:
        firsts = columns.first[begin : end + 1].tolist()
        base = int(columns.first[0])
        requests = slice(firsts[0] - base, firsts[-1] - base)
        of_turns = (columns.num_input, columns.num_output, columns.think_s)
        turns = list(zip(*(column[requests].tolist() for column in of_turns), strict=True))
        of_sessions = (columns.kind, columns.group, columns.tenant)
        facts = zip(*(column[begin:end].tolist() for column in of_sessions), strict=True)
        instants = [0.0] * (end - begin) if self._at is None else self._at[begin:end].tolist()
        rows = zip(itertools.pairwise(firsts), facts, instants, strict=True)
        for session, ((index, after), (kind, group, tenant), at) in enumerate(rows, columns.session + begin):
            own = turns[index - firsts[0] : after - firsts[0]]
            first = _first(index, at, self._kinds[kind], group, tenant)
            first.session = session if len(own) > 1 else -1
            if group >= 0:
                first.pieces = ((key(GROUP, kind * MAX_GROUPS + group), self._kinds[kind].prefix_len),)
            yield _chain(first, own)


def _first(index: int, at: float, kind: Kind, group: int, tenant: int) -> Planned:
    """A session's first request, with all that its later ones have from it."""
    return Planned(
        index,
        at,
        (),
        0,
        kind.name,
        kind.tenant or (f"tenant-{tenant}" if tenant >= 0 else ""),
        group=group,
        priority=kind.priority,
        deadline_ms=kind.deadline_ms,
        priority_class=kind.priority_class,
    )


def _chain(first: Planned, turns: list[tuple[int, int, float]]) -> Chain:
    """All requests of a session: each has those before it, and their answers, in its prompt."""
    (num_input, first.num_output, _), *later = turns
    first.turns_left = len(later)
    pieces: list[Piece] = [*first.pieces, (key(TURN if later else UNIQUE, first.index), num_input)]
    first.pieces = tuple(pieces)
    chain = [first]
    for turn, (num_input, num_output, think_s) in enumerate(later, 1):
        index = first.index + turn
        pieces += ((key(ANSWER, index - 1), chain[-1].num_output), (key(TURN, index), num_input))
        chain.append(
            Planned(
                index,
                0.0,
                tuple(pieces),
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
    return chain


def early_sessions(kinds: list[Kind]) -> int:
    """Sessions of an endless plan that are drawn at once: fewer where each has many turns."""
    turns = max(kind.turns.mean for kind in kinds)
    return max(1, min(EARLY_SESSIONS, int(EARLY_REQUESTS / turns)))
