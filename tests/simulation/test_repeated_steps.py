"""Steps that are taken together give the same results, byte for byte, as steps that are taken one by one."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.examples import examples

from common.cache.page_allocator import Owner
from common.config.cli import parse
from common.config.scheduling import POLICIES
from common.step_plan import StepPlan, StepResult
from scripts.load_tester.workload.plan import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.service.engine import ScriptedEngine
from scripts.simulator.simulation import Simulation


def results(words: list[str], *, is_stepwise: bool) -> dict[str, Any]:
    """The report, every outcome and the state of every node after a run, but for the time that it took."""
    config = parse(SimulateConfig, words, command="simulate")
    simulation = Simulation(config, make_plan(config), is_stepwise=is_stepwise)
    found = simulation.run()
    del found["wall_s"], found["row_steps_per_minute"]
    nodes = [
        {
            "heartbeat": repr(node.heartbeat()),
            "work": node.work,
            "busy_s": node.busy_s,
            "used_page_s": node.used_page_s,
            "requests": repr(list(node.role.requests().values())),
            "gaps": [node.role.stats.inter_token.counts, node.role.stats.inter_token.sum],
            "pages": [node.allocator.alloc(1, Owner.RADIX) for _ in range(min(node.allocator.num_free, 40))],
        }
        for node in simulation.cluster.nodes.values()
    ]
    outcomes = [
        [o.due_at, o.stamps_s, o.extra, o.ended_at, o.error, o.cached_tokens, o.timings]
        for o in simulation.client.outcomes
    ]
    same: dict[str, Any] = json.loads(json.dumps({"report": found, "nodes": nodes, "outcomes": outcomes}))
    return same


def assert_alike(words: list[str]) -> None:
    together = results(words, is_stepwise=False)
    stepwise = results(words, is_stepwise=True)
    for name, value in stepwise.items():
        assert together[name] == value, f"{name} differ for simulate {' '.join(words)}"


def test_a_lone_output_takes_a_few_steps_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    num_run = 0
    run = ScriptedEngine.run

    def counted(engine: ScriptedEngine, plan: StepPlan) -> StepResult:
        nonlocal num_run
        num_run += 1
        return run(engine, plan)

    monkeypatch.setattr(ScriptedEngine, "run", counted)
    words = ["--num-requests=1", "--input-len=100", "--output-len=400"]
    assert results(words, is_stepwise=True)["report"]["row_steps"] == 399
    assert num_run == 400  # one of them on the prefill node
    num_run = 0
    assert results(words, is_stepwise=False)["report"]["row_steps"] == 399
    assert num_run == 3  # the prompt, the row that joins, and the last one; the steps between are alike


#: Pages of aborted requests lingered behind a step that was repeated.
LINGERING = (
    "--decode=3 --num-requests=48 --seed=8000 --schedule-policy=hrrn --page-size=4 --max-total-tokens=2048"
    " --max-running-requests=4 --input-len=lognormal:60:1:max=240 --output-len=uniform:1:200 --chunked-prefill-size=32"
    " --context-token-cost=20us --arrival=burst --rate=40 --burst-size=8 --num-reserved-decode-tokens=8"
    " --max-queued-requests=5 --tenants=3"
)
URGENT = (
    "--enable-priority-scheduling --mix=a:share=1,priority=5,output=uniform:1:90;b:share=2,priority=1,tenant=T;"
    "c:share=1,priority=9,deadline=700ms"
)


@st.composite
def options(draw: st.DrawFn) -> list[str]:
    """Options of small services, most of which lack something: pages, rows, or time."""

    def some(*choices: str) -> str:
        return draw(st.sampled_from(choices))

    local = some("never", "never", "auto", "always")
    words = [
        f"--prefill={0 if local == 'always' else draw(st.integers(1, 2))}",
        f"--decode={draw(st.integers(1, 3))}",
        f"--num-requests={some('20', '40', '10')}",
        f"--seed={draw(st.integers(0, 9999))}",
        f"--schedule-policy={draw(st.sampled_from(POLICIES))}",
        f"--page-size={some('4', '1', '16')}",
        f"--max-total-tokens={some('1024', '512', '2048', '40000')}",
        f"--max-running-requests={some('4', '8', '2', '64')}",
        f"--local-prefill={local}",
        f"--input-len={some('30', 'uniform:1:200', 'lognormal:60:1:max=240')}",
        f"--output-len={some('40', 'uniform:1:200', 'lognormal:80:1:max=250')}",
        f"--chunked-prefill-size={some('32', '2048')}",
        f"--message-cost={some('100us', '0s', '5ms', '13ms')}",
        f"--context-token-cost={some('0.04us', '0s', '20us')}",
        f"--request-timeout={some('600', '600', '2', '0.8')}",
        some(
            *("--rate=20", "--rate=60", "--rate=5", "--concurrency=6", "--concurrency=20"),
            *("--arrival=constant --rate=10", "--arrival=burst --rate=40 --burst-size=8"),
        ),
        some("", "", "--max-new-tokens=60", "--max-new-tokens=400"),
        some("", "", "--turns=3 --think=50ms", "--prefix-len=64 --prefix-groups=2"),
        some("--num-reserved-decode-tokens=0", "", "--num-reserved-decode-tokens=8", "--resume-prefill-threshold=16"),
        some("", "", "--disable-radix-cache", "--radix-eviction-policy=lfu"),
        some("", "", "--enable-mixed-chunk", "--stream-interval=3", "--max-queued-requests=5"),
        some("", "--local-prefill-threshold=200") if local == "auto" else "",
        some("", "", "--tenants=3", "--max-skip-ahead=0", "--refuse-hopeless"),
    ]
    if draw(st.booleans()):
        words += [
            URGENT,
            some("", "--priority-scheduling-preemption-threshold=0 --preemption-cooldown=0"),
            some("", "--retraction-policy=priority"),
            some(
                "",
                "--priority-aging-per-second=2 --default-priority-value=1",
                "--priority-classes=high:8,low:1 --default-priority-class=low",
            ),
        ]
    else:
        words.append(some("", "--mix=a:share=1,deadline=500ms;b:share=2,tenant=T,output=120"))
    return [one for word in words for one in word.split()]


@settings(max_examples=examples(12), derandomize=True)
@given(words=options())
@example(words=LINGERING.split())
def test_steps_taken_together_give_the_same_results(words: list[str]) -> None:
    assert_alike(words)


@pytest.mark.slow
@settings(max_examples=30)
@given(words=options())
def test_steps_taken_together_give_the_same_results_in_many_services(words: list[str]) -> None:
    assert_alike(words)
