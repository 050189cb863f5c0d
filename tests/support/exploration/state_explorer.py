"""Explores every state that a small world can reach by any order of its actions.

The search is breadth first, so that a failure has a shortest path. Worlds are copied by pickling. Two worlds are the
same state if the hashes of the least of their ``states()`` are equal.
"""

import hashlib
import importlib
import io
import pickle
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

Action = tuple[Any, ...]


class World(Protocol):
    def freeze(self) -> bytes:
        """Return the pickled world."""
        ...

    def actions(self) -> Iterable[Action]:
        """Return the possible actions; none in a final state."""
        ...

    def do(self, action: Action) -> None: ...

    def states(self) -> Iterable[bytes]:
        """Return what determines all further behaviour, in each way of naming the things that behave alike."""
        ...

    def check(self) -> None:
        """Raises AssertionError if this state violates an invariant."""
        ...

    def check_end(self) -> None:
        """Raises AssertionError if this final state violates an invariant."""
        ...


@dataclass
class Exploration:
    """The result of a search.

    Attributes:
        num_states, num_steps: states, and actions that lead from one state to another.
        num_ends: final states.
        longest: length of the shortest path to the farthest state.
        after: for each state the states that follow it.
    """

    num_states: int = 0
    num_steps: int = 0
    num_ends: int = 0
    longest: int = 0
    after: list[list[int]] = field(default_factory=list, repr=False)


@cache
def _named(module: str, name: str) -> object:
    return getattr(importlib.import_module(module), name)


class _Thawer(pickle.Unpickler):
    """An unpickler that does not import a module for every object."""

    find_class = staticmethod(_named)


def thaw(frozen: bytes) -> World:
    world: World = _Thawer(io.BytesIO(frozen)).load()
    return world


def fingerprint(states: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(min(states), digest_size=16).digest()


def explore(start: World, max_states: int) -> Exploration:
    """Check every reachable state, and that every run ends.

    Raises:
        AssertionError: a check failed; the message contains the shortest path to the state.
    """
    found = Exploration(after=[[]])
    numbers = {fingerprint(start.states()): 0}
    paths: list[tuple[int, Action] | None] = [None]
    depths = [0]
    frontier = deque([(0, start.freeze())])
    while frontier:
        number, frozen = frontier.popleft()
        here = thaw(frozen)
        actions = list(here.actions())
        for place, action in enumerate(actions, 1):
            world = here if place == len(actions) else thaw(frozen)  # saves one copy per state
            try:
                world.do(action)
                name = fingerprint(world.states())
                after = numbers.setdefault(name, len(paths))
                if after == len(paths):
                    world.check()
            except AssertionError as error:
                raise AssertionError(f"{error}\n{_path_to(paths, number)}\n  {action}") from error
            if after == number:
                continue
            found.after[number].append(after)
            found.num_steps += 1
            if after == len(paths):
                assert after < max_states, f"more than {max_states} states"
                paths.append((number, action))
                depths.append(depths[number] + 1)
                found.after.append([])
                frontier.append((after, world.freeze()))
        if not found.after[number]:
            found.num_ends += 1
            try:
                thaw(frozen).check_end()
            except AssertionError as error:
                raise AssertionError(f"{error}\n{_path_to(paths, number)}") from error
    found.num_states = len(paths)
    found.longest = max(depths)
    _assert_every_run_ends(found)
    return found


def _path_to(paths: list[tuple[int, Action] | None], number: int) -> str:
    actions = []
    while (path := paths[number]) is not None:
        number, action = path
        actions.append(f"  {action}")
    return "\n".join(reversed(actions))


def _assert_every_run_ends(found: Exploration) -> None:
    """Assert that the states form no cycle (Kahn's algorithm removes all of them), so that every run ends."""
    num_before = [0] * found.num_states
    for afters in found.after:
        for after in afters:
            num_before[after] += 1
    free = [number for number, count in enumerate(num_before) if not count]
    num_taken = 0
    while free:
        num_taken += 1
        for after in found.after[free.pop()]:
            num_before[after] -= 1
            if not num_before[after]:
                free.append(after)
    assert num_taken == found.num_states, "a run can loop for ever"
