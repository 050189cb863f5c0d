"""Records the launches of Triton kernels instead of running them."""

from collections.abc import Sequence

import pytest

Launch = tuple[str, tuple[int, ...]]


def record_launches(monkeypatch: pytest.MonkeyPatch, module: object, names: Sequence[str]) -> list[Launch]:
    """The list to which the name and the grid of every launch of these kernels of a module are added."""
    launches: list[Launch] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launches.append((self.name, grid))
            return lambda *_, **__: None

    for name in names:
        monkeypatch.setattr(module, name, Recorded(name))
    return launches
