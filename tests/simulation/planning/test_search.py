"""The search, over services whose behaviour is a formula."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config.cli import parse
from scripts.simulator.config import SimulateConfig
from scripts.simulator.costs import Costs
from scripts.simulator.hardware.node_model import NodeModel
from scripts.simulator.planning.deployment import Deployment, Settings
from scripts.simulator.planning.estimate import LoadSize, RequestSize
from scripts.simulator.planning.planner import FACTORS, Choices, LoadRow, Planner, PlanResult
from scripts.simulator.planning.report import crossing_words, plan_lines, short_words
from scripts.simulator.planning.search import MAX_FACTOR, Found, Goal, best_settings, capacity, fewest, tune
from scripts.simulator.planning.verdict import Verdict, WindowResult, is_hopeless, judge

GOAL = Goal(share=0.9, confidence=0.8, max_devices=500)


def verdict(share: float, *, late: int = 0, slow: int = 0) -> Verdict:
    return Verdict(share, (share, share), 1.0 if share >= 0.9 else 0.0, late, slow, 4, True)


class Service:
    """Needs a number of prefill and of decode nodes for the load; each that is missing costs a share."""

    def __init__(self, prefill: float, decode: float, colocated: float = 0.0) -> None:
        self.needs = (prefill, decode, colocated)
        self.asked: list[tuple[Deployment, float]] = []

    def __call__(self, deployment: Deployment, factor: float) -> Verdict:
        self.asked.append((deployment, factor))
        prefill, decode, colocated = (need * factor for need in self.needs)
        own = deployment.settings
        if own.is_colocated:
            return verdict(min(1.0, 0.95 * deployment.num_decode * own.decode_tp / colocated), late=1)
        late = max(0.0, 1 - deployment.num_prefill * own.prefill_tp / prefill)
        slow = max(0.0, 1 - deployment.num_decode * own.decode_tp / decode)
        return verdict(0.95 * (1 - late) * (1 - slow), late=round(1000 * late), slow=round(1000 * slow))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_fewest_finds_exactly_what_is_needed_from_any_start(prefill: int, decode: int, first: int, second: int) -> None:
    service = Service(prefill, decode)
    found = fewest(service, Deployment(first, second), GOAL)
    assert found is not None
    held = found.deployment
    assert GOAL.is_held(found.verdict)
    for role in held.settings.roles:
        assert held.count(role) == 1 or not GOAL.is_held(service(held.plus(role, -1), 1.0))


def test_the_search_gives_up_at_its_bounds() -> None:
    assert fewest(Service(1_000, 1), Deployment(1, 1), GOAL) is None
    assert fewest(Service(8, 8), Deployment(1, 1), GOAL, below=8) is None


def test_nodes_with_more_devices_are_chosen_where_they_need_fewer() -> None:
    class Steep(Service):
        """Prompts are late on nodes of one device, however many there are."""

        def __call__(self, deployment: Deployment, factor: float) -> Verdict:
            if deployment.settings.prefill_tp == 1 and deployment.num_prefill < 20:
                return verdict(0.5, late=1)
            return super().__call__(deployment, factor)

    starts = [Deployment(2, 3, Settings(1, 1)), Deployment(1, 3, Settings(2, 1)), Deployment(1, 2, Settings(1, 2))]
    found = best_settings(Steep(4, 3), starts, GOAL)
    assert found is not None
    assert found.deployment == Deployment(2, 3, Settings(2, 1))


def test_tuning_keeps_a_setting_that_holds_better_and_saves_nodes() -> None:
    class Chunky(Service):
        def __call__(self, deployment: Deployment, factor: float) -> Verdict:
            small = deployment.settings.chunk_tokens == 2_048
            return Service(4 if small else 6, 2)(deployment, factor)

    service = Chunky(0, 0)
    base = fewest(service, Deployment(6, 2), GOAL)
    assert base is not None
    assert base.deployment.num_devices == 8
    variants = [Settings(batch_limit=64), Settings(chunk_tokens=2_048)]
    found = tune(service, base, variants, GOAL)
    assert found.deployment == Deployment(4, 2, Settings(chunk_tokens=2_048))


@given(st.floats(0.2, 20.0))
@settings(max_examples=30, deadline=None)
def test_capacity_is_the_largest_load_that_holds(needed: float) -> None:
    service = Service(needed, 0.001)
    found = capacity(service, Deployment(10, 1), GOAL)
    exact = 10 / needed * 0.95 / 0.9  # 0.95 of requests are good where no node is missing
    assert found <= exact * 1.0001
    assert found >= exact / 1.07


@pytest.mark.parametrize("start", [1.0, 2 * MAX_FACTOR])
def test_capacity_ends_where_everything_holds(start: float) -> None:
    found = capacity(lambda deployment, factor: verdict(1.0), Deployment(1, 1), GOAL, start=start)
    assert max(start, MAX_FACTOR) <= found <= 2 * MAX_FACTOR


def test_capacity_is_zero_where_nothing_holds() -> None:
    assert capacity(lambda deployment, factor: verdict(0.1), Deployment(1, 1), GOAL) == 0.0


def test_a_plan_that_holds_all_loads_that_were_tried_names_the_last_one() -> None:
    load = LoadSize((RequestSize(1_000, 0, 10, 10.0, 1.0),) * 10, 10.0)
    choices = Choices({1: NodeModel(Costs(0.01, 0.001, 0.001, 0.0), 256, 20_000, 1, 1.0)})
    config = parse(SimulateConfig, ["--plan", "--slo-ttft=10s"], command="simulate")
    plan = Planner(lambda deployment, factor: verdict(1.0), load, choices, goal=GOAL).plan()
    lines = plan_lines(plan, config)
    assert [line for line in lines if line.startswith(("reserve", "next node"))] == [
        "reserve     1 colocated hold over 69.4 requests/s, the last load that was tried"
    ]
    assert any(line.startswith("plan        1 colocated node, 1 device") for line in lines)


# ---- where a colocated pool is cheaper ------------------------------------------------------------------------------


def rows_of(service: Service) -> tuple[LoadRow, ...]:
    load = LoadSize((RequestSize(1_000, 0, 10, 10.0, 1.0),) * 10, 10.0)
    choices = Choices({1: NodeModel(Costs(0.01, 0.001, 0.001, 0.0), 256, 20_000, 1, 1.0)})
    return Planner(service, load, choices, goal=GOAL).plan().rows


def test_the_load_at_which_a_colocated_pool_ceases_to_be_cheaper_is_found_within_a_tenth() -> None:
    """One node of each role suffices for all loads. A colocated one needs 0.8 of a node for a share of 0.95, and 0.9
    is asked for; beyond that two are needed."""
    rows = rows_of(Service(0.25, 0.25, 0.8))
    assert [row.factor for row in rows] == sorted({*FACTORS, *(row.factor for row in rows)})
    cheaper = [row.factor for row in rows if row.is_colocated_cheaper]
    others = [row.factor for row in rows if not row.is_colocated_cheaper]
    crossing = 0.95 / 0.9 / 0.8
    assert cheaper[-1] <= crossing < others[0] <= 1.1 * cheaper[-1]


def test_no_load_is_added_where_a_colocated_pool_is_always_or_never_cheaper() -> None:
    assert tuple(row.factor for row in rows_of(Service(1, 1, 0.5))) == FACTORS
    assert tuple(row.factor for row in rows_of(Service(4, 4, 40))) == FACTORS


# ---- verdicts -------------------------------------------------------------------------------------------------------


def test_windows_are_resampled_whole() -> None:
    same = judge([WindowResult(100, 100, 95)] * 6, 0.9)
    assert same.share == pytest.approx(0.95)
    assert same.interval == pytest.approx((0.95, 0.95))
    assert same.confidence == 1.0
    mixed = judge([WindowResult(100, 100, 100), WindowResult(100, 100, 60)] * 3, 0.9)
    assert mixed.share == pytest.approx(0.8)
    assert mixed.interval[0] < 0.7 < 0.9 < mixed.interval[1]
    # At least five of six drawn windows must be good for 0.9: a binomial probability of 7/64.
    assert mixed.confidence == pytest.approx(7 / 64, abs=0.02)


def test_windows_count_by_their_requests() -> None:
    assert judge([WindowResult(10, 10, 0), WindowResult(90, 90, 90)], 0.9).share == pytest.approx(0.9)


def test_a_deployment_is_hopeless_once_too_many_have_missed() -> None:
    bad, good = WindowResult(100, 100, 55, num_late=45), WindowResult(100, 100, 100)
    assert not is_hopeless([bad], 0.9, 5)  # 45 of 500 may miss
    assert is_hopeless([bad, bad], 0.9, 5)
    assert not is_hopeless([good, bad], 0.9, 5)
    assert not is_hopeless([], 0.9, 5)


def test_a_window_that_was_stopped_counts_as_if_it_had_gone_on_like_this() -> None:
    stopped = WindowResult(100, 22, 0, num_late=22, is_whole=False)
    windows = [WindowResult(100, 100, 100)] * 8 + [stopped] * 2
    found = judge(windows, 0.9)
    assert found.share == pytest.approx(0.8)
    assert not GOAL.is_held(found)
    assert is_hopeless(windows, 0.9, 10)  # 200 of 1,000 miss


# ---- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([(2, 2), (4, 4)], "not cheaper at any simulated load, 10 and 20 requests/s among them"),
        ([(2, 1), (4, 3)], "cheaper at all simulated loads, up to 20 requests/s"),
        ([(2, 1), (4, 4)], "cheaper up to 10 requests/s, and no longer at 20 requests/s"),
        ([(2, 2), (4, 3)], "cheaper from 20 requests/s on, and not yet at 10 requests/s"),
        ([(2, 1), (4, 4), (5, 4)], "cheaper at 10 and 30 requests/s, not at 20 requests/s"),
    ],
)
def test_the_loads_at_which_a_colocated_pool_is_cheaper_are_named(devices: list[tuple[int, int]], words: str) -> None:
    rows = tuple(
        LoadRow(
            float(number),
            Found(Deployment(1, separate - 1), verdict(1.0)),
            Found(Deployment(0, pool, Settings(local_prefill="always")), verdict(1.0)),
        )
        for number, (separate, pool) in enumerate(devices, 1)
    )
    load = LoadSize((RequestSize(1, 0, 1),) * 10, 1.0)
    assert crossing_words(PlanResult(load, rows[0].separate, rows[0].colocated, rows)) == words


def test_a_colocated_pool_has_the_price_of_its_own_nodes() -> None:
    """Of a model that fits no single device."""
    node = NodeModel(Costs(), 256, 20_000, 2, 7.0)
    pool = Found(Deployment(0, 3, Settings(1, 2, local_prefill="always")), verdict(1.0))
    separate = Found(Deployment(2, 2, Settings(2, 2)), verdict(1.0))
    result = PlanResult(LoadSize((RequestSize(1, 0, 1),), 1.0), separate, pool, nodes={2: node})
    assert (result.price_per_hour(pool.deployment), result.price_per_hour(separate.deployment)) == (21.0, 28.0)
    assert result.chosen is pool


def test_windows_that_are_too_short_for_queues_to_grow_are_named() -> None:
    result = PlanResult(LoadSize((RequestSize(1, 0, 1),) * 10, 60.0), None, None)
    given = parse(SimulateConfig, ["--plan", "--slo-ttft=2s", "--plan-windows=3"], command="simulate")
    assert short_words(result, given) == ""
    given = parse(SimulateConfig, ["--plan", "--slo-ttft=3s", "--plan-windows=3"], command="simulate")
    assert short_words(result, given).startswith(
        "a window lasts 20 s, too short for queues to grow beside a TTFT of 3 s"
    )
