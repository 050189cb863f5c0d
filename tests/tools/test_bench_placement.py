"""``bench placement``: its fixed pairings, and the stretches of its loads."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.gateway.candidates import Candidate

from common.config.cli import parse
from gateway.workers.routing.router import Router
from scripts.benchmarks.virtual_time import placement
from scripts.benchmarks.virtual_time.fixed_pairing import (
    InTurn,
    LeastLoad,
    LeastLoadWithAffinity,
    LongestPrefix,
    PairedConfig,
)
from scripts.load_tester.workload.plan import make_plan

NODES = [tuple(Candidate(f"{role}{number}", 1_000) for number in range(2)) for role in "pd"]
LONG, SHORT, LONG_AGAIN = (1,) * 300, (2,) * 70, (1,) * 310


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (InTurn, ["p0", "p1", "p0", "p1"]),
        (LeastLoad, ["p0", "p1", "p1", "p1"]),  # 300 tokens against 160
        (LongestPrefix, ["p0", "p1", "p1", "p0"]),
        # The last prompt lacks 54 of its 310 tokens on the node of the first: 354 to compute against 470.
        (LeastLoadWithAffinity, ["p0", "p1", "p1", "p0"]),
    ],
)
def test_fixed_pairings_choose_by_their_rule(kind: type[Router], expected: list[str]) -> None:
    router = kind()
    prompts = (LONG, SHORT, (3,) * 90, LONG_AGAIN)
    pairs = [router.choose(*NODES, prompt, num_new=8) for prompt in prompts]
    assert [pair and pair.prefill for pair in pairs] == expected


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    placement.add_options(parser)
    return parser.parse_args(words)


def test_a_service_has_the_router_of_its_rule() -> None:
    config = parse(PairedConfig, ["--local-prefill=auto"], command="simulate")
    assert config.router is Router
    pool = replace(config, router=InTurn).pool("m")
    assert isinstance(pool.router, InTurn)
    assert pool.router.uses_costs


def test_stretches_of_a_trace_have_so_many_requests_and_the_mean_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3_000 * number, "input_length": 100, "output_length": 5, "hash_ids": [number]}
        for number in range(50)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    loads = placement.loads_of(str(trace), 4.0, options("--num-requests=10", "--windows=3"))
    assert len(loads) == 3
    for load in loads:
        plan = make_plan(parse(PairedConfig, load.words, command="simulate"))
        assert plan.num_requests == 10
        instants = [session[0].at for session in plan.sessions]
        assert instants[-1] - instants[0] == pytest.approx(10 / 4.0, rel=0.25)


def test_stretches_without_a_trace_differ() -> None:
    first, second = placement.loads_of("", 4.0, options("--num-requests=10", "--windows=2"))
    assert first.plan is not None and second.plan is not None
    assert [one[0].num_input for one in first.plan.sessions] != [one[0].num_input for one in second.plan.sessions]
