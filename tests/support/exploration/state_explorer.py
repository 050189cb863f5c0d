"""Explores every state that a small world can reach by any order of its actions.

The search is breadth first, so that a failure has a shortest path. Worlds are copied by pickling. Two worlds are the
same state if the hashes of their pickled ``state()`` are equal; it is pickled without the memo, so that equal values
have equal bytes.
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
        """Returns bytes from which ``pickle.loads`` makes a copy of this world."""
        ...

    def actions(self) -> Iterable[Action]:
        """Returns the possible actions; none in a final state."""
        ...

    def do(self, action: Action) -> None: ...

    def state(self) -> object:
        """Returns plain values that determine all further behaviour."""
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


def fingerprint(state: object) -> bytes:
    into = io.BytesIO()
    pickler = pickle.Pickler(into, 5)
    pickler.fast = True
    pickler.dump(state)
    return hashlib.blake2b(into.getbuffer(), digest_size=16).digest()


def explore(start: World, max_states: int) -> Exploration:
    """Check every reachable state, and that every run ends.

    Raises:
        AssertionError: a check failed; the message contains the shortest path to the state.
    """
    found = Exploration(after=[[]])
    numbers = {fingerprint(start.state()): 0}
    paths: list[tuple[int, Action] | None] = [None]
    depths = [0]
    frontier = deque([(0, start.freeze())])
    while frontier:
        number, frozen = frontier.popleft()
        here: World = pickle.loads(frozen)
        actions = list(here.actions())
        for place, action in enumerate(actions, 1):
            world: World = here if place == len(actions) else pickle.loads(frozen)  # saves one copy per state
            try:
                world.do(action)
                name = fingerprint(world.state())
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
                pickle.loads(frozen).check_end()
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
