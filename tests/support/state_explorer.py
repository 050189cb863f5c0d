"""Every state that a small world can get into, by any order of its actions; breadth first, so that what fails is short.

A world is copied by pickling. Two of them are one state when their ``state()`` is equal, which is compared by a hash of
its bytes (pickled without memory of what is shared, so that equal values have equal bytes).
"""

import hashlib
import io
import pickle
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

Action = tuple[Any, ...]


class World(Protocol):
    def freeze(self) -> bytes:
        """This world as bytes, of which ``pickle.loads`` makes a copy."""
        ...

    def actions(self) -> Iterable[Action]:
        """What can happen now; nothing at all at an end."""
        ...

    def do(self, action: Action) -> None: ...

    def state(self) -> object:
        """Everything that what follows depends on, in plain values."""
        ...

    def check(self) -> None:
        """Raises AssertionError if this state must not be."""
        ...

    def check_end(self) -> None:
        """Raises AssertionError if it must not end here."""
        ...


@dataclass
class Exploration:
    """What was found.

    Attributes:
        num_states, num_steps: states, and actions that lead from one to another.
        num_ends: states in which nothing can happen any more.
        longest: actions from the beginning to the farthest state, by the shortest way.
    """

    num_states: int = 0
    num_steps: int = 0
    num_ends: int = 0
    longest: int = 0
    after: list[list[int]] = field(default_factory=list, repr=False)


def fingerprint(state: object) -> bytes:
    into = io.BytesIO()
    pickler = pickle.Pickler(into, 5)
    pickler.fast = True
    pickler.dump(state)
    return hashlib.blake2b(into.getbuffer(), digest_size=16).digest()


def explore(start: World, max_states: int) -> Exploration:
    """Every reachable state is checked; and so is that every run ends, whatever happens when.

    Raises:
        AssertionError: with the shortest way to what was found.
    """
    found = Exploration(after=[[]])
    numbers = {fingerprint(start.state()): 0}
    ways: list[tuple[int, Action] | None] = [None]
    depths = [0]
    frontier = deque([(0, start.freeze())])
    while frontier:
        number, frozen = frontier.popleft()
        here: World = pickle.loads(frozen)
        actions = list(here.actions())
        for place, action in enumerate(actions, 1):
            world: World = here if place == len(actions) else pickle.loads(frozen)  # a copy less for each state
            try:
                world.do(action)
                name = fingerprint(world.state())
                after = numbers.setdefault(name, len(ways))
                if after == len(ways):
                    world.check()
            except AssertionError as error:
                raise AssertionError(f"{error}\n{_told(ways, number)}\n  {action}") from error
            if after == number:
                continue
            found.after[number].append(after)
            found.num_steps += 1
            if after == len(ways):
                assert after < max_states, f"more than {max_states} states"
                ways.append((number, action))
                depths.append(depths[number] + 1)
                found.after.append([])
                frontier.append((after, world.freeze()))
        if not found.after[number]:
            found.num_ends += 1
            try:
                pickle.loads(frozen).check_end()
            except AssertionError as error:
                raise AssertionError(f"{error}\n{_told(ways, number)}") from error
    found.num_states = len(ways)
    found.longest = max(depths)
    _assert_every_run_ends(found)
    return found


def _told(ways: list[tuple[int, Action] | None], number: int) -> str:
    actions = []
    while (way := ways[number]) is not None:
        number, action = way
        actions.append(f"  {action}")
    return "\n".join(reversed(actions))


def _assert_every_run_ends(found: Exploration) -> None:
    """There is no way round in a circle (Kahn's algorithm takes every state away), so each run comes to an end."""
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
    assert num_taken == found.num_states, "a run can go round for ever"
