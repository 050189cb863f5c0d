"""``bench overload`` divides answers by the time in which they came."""

import argparse
import asyncio
import types

import pytest

from scripts.benchmarks.services import overload
from scripts.benchmarks.services.overload import Overload


class OneAnswerEachSecond(Overload):
    """Of a service that answers one request after another, in a second each."""

    clock = 0.0

    async def _ask(self) -> float:
        await asyncio.sleep(0)  # the other clients ask too
        self.clock += 1.0
        self.ended_at.append(self.clock)
        return 0.0


def test_the_capacity_counts_the_time_of_the_last_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients ask within the two seconds of the load, and the last of them has its answer after that."""
    load = OneAnswerEachSecond("http://127.0.0.1:1", argparse.Namespace())
    monkeypatch.setattr(overload, "time", types.SimpleNamespace(monotonic=lambda: load.clock))
    assert asyncio.run(load._closed_loop(2.0)) == 1.0
