"""A plan as one self-contained page, with the charts of the load tester."""

from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.load_tester.reporting.charts import TitledChart
from scripts.load_tester.reporting.formats import milliseconds, per_second, percent
from scripts.load_tester.reporting.headline import Alert, Tile
from scripts.load_tester.reporting.html_report import Cell, Row, Table, render
from scripts.load_tester.reporting.svg import Chart
from scripts.simulator.config import SimulateConfig
from scripts.simulator.planning.deployment import Deployment
from scripts.simulator.planning.planner import LoadRow, PlanResult
from scripts.simulator.planning.report import (
    alternative_words,
    crossing_words,
    deployment_words,
    objective_words,
    verdict_words,
)
from scripts.simulator.planning.search import MAX_FACTOR, Found
from scripts.simulator.planning.verdict import Verdict

Verdicts = Mapping[tuple[Deployment, float], Verdict]
RATE = "requests/s"


def plan_page(result: PlanResult, config: SimulateConfig, verdicts: Verdicts) -> str:
    chosen = result.chosen
    flags = " ".join(chosen.deployment.flags()) if chosen else "(no plan)"
    return render(
        "plan.html.j2",
        title=f"Plan for {config.model or 'a service'} on {config.hardware or 'nodes of given costs'}",
        subtitle=f"{objective_words(config)}; {_load_words(result, config)}",
        alerts=_alerts(result),
        tiles=_tiles(result, chosen) if chosen else [],
        loads=_loads(result),
        charts=plan_charts(result, config, verdicts),
        simulated=_simulated(result, verdicts),
        command=flags,
    )


def _load_words(result: PlanResult, config: SimulateConfig) -> str:
    name = f"trace {Path(config.trace).name}, " if config.trace else ""
    return f"{name}{per_second(result.load.requests_per_s)} requests/s"


def _alerts(result: PlanResult) -> list[Alert]:
    chosen = result.chosen
    if chosen is None:
        return [Alert("bad", f"No plan: {result.why}.")]
    return [
        Alert("good", f"{deployment_words(result, chosen.deployment)}; {chosen.deployment.settings.words()}."),
        Alert("", f"It holds {verdict_words(chosen.verdict)}."),
        Alert("", f"Instead: {alternative_words(result)}."),
        Alert("", f"A colocated pool: {crossing_words(result)}."),
    ]


def _tiles(result: PlanResult, chosen: Found) -> list[Tile]:
    deployment, verdict = chosen.deployment, chosen.verdict
    low, high = verdict.interval
    tiles = [
        Tile("Devices", f"{result.num_devices(deployment):,}", "", deployment.words(), tone="good"),
        Tile(
            "Within objectives", percent(verdict.share), "", "share of requests", f"{percent(low)} to {percent(high)}"
        ),
    ]
    if result.price_per_hour(deployment):
        price = result.price_per_million(deployment)
        output = result.price_per_million_output(deployment)
        tiles += [
            Tile("Price", f"{result.price_per_hour(deployment):,.2f}", "$/h", "of all nodes"),
            Tile(
                "Cost",
                f"{price:.3g}",
                "$/Mtok",
                "of prompts and outputs",
                note=f"{output:.3g} $ per million of outputs",
            ),
        ]
    own = result.capacities[0][1] if result.capacities else 0.0
    for one, factor in result.capacities:
        most = "Holds over" if own >= MAX_FACTOR else "Holds up to"
        name = most if one == deployment else f"With {one.words()}"
        gain = f"{factor - 1:+.0%} against the load" if one == deployment or not own else f"{factor / own - 1:+.0%}"
        tiles.append(Tile(name, per_second(factor * result.load.requests_per_s), RATE, gain))
    return tiles


def _loads(result: PlanResult) -> Table:
    rows = [
        Row(
            f"{per_second(row.factor * result.load.requests_per_s)} requests/s",
            [cell for found in (row.separate, row.colocated) for cell in _load_cells(result, row, found)],
        )
        for row in result.rows
    ]
    head = ("load", "prefill and decode nodes", "devices", "$/Mtok", "colocated pool", "devices", "$/Mtok")
    return Table.of(head, rows)


def _load_cells(result: PlanResult, row: LoadRow, found: Found | None) -> list[Cell]:
    if found is None:
        return [Cell("-"), Cell("-"), Cell("-")]
    price = result.price_per_million(found.deployment, row.factor)
    words = Cell(found.deployment.words(), percent(found.verdict.share))
    return [words, Cell(f"{result.num_devices(found.deployment):,}"), Cell(f"{price:.3g}" if price else "-")]


def _simulated(result: PlanResult, verdicts: Verdicts) -> Table:
    rows = [
        Row(
            deployment.words(),
            [
                Cell(per_second(factor * result.load.requests_per_s)),
                Cell(percent(verdict.share), f"{percent(verdict.interval[0])} to {percent(verdict.interval[1])}"),
                Cell(percent(verdict.confidence)),
                Cell(milliseconds(verdict.ttft_p99_s)),
                Cell(milliseconds(verdict.itl_p99_s)),
                Cell("" if verdict.is_whole else "ended early"),
            ],
            deployment.settings.words(),
        )
        for (deployment, factor), verdict in verdicts.items()
    ]
    return Table.of(("nodes", RATE, "good", "sure", "TTFT p99, ms", "ITL p99, ms", ""), rows)


# ---- charts ---------------------------------------------------------------------------------------------------------


def plan_charts(result: PlanResult, config: SimulateConfig, verdicts: Verdicts) -> list[TitledChart]:
    """Good requests over the load, devices over the load, cost over the load."""
    charts = []
    if result.capacities:
        charts.append(("Good requests by load", _share_chart(result, config, verdicts)))
    if result.rows:
        charts.append(("Devices by load", _devices_chart(result)))
    if result.chosen and result.price_per_hour(result.chosen.deployment):
        charts.append(("Cost by load", _cost_chart(result)))
    return charts


def _share_chart(result: PlanResult, config: SimulateConfig, verdicts: Verdicts) -> Chart:
    chart = Chart(RATE, "share of good requests", y=(0.0, 1.05))
    for colour, (deployment, _) in enumerate(result.capacities):
        at = sorted((factor, verdict) for (one, factor), verdict in verdicts.items() if one == deployment)
        rate = result.load.requests_per_s
        points = [(factor * rate, verdict.share) for factor, verdict in at]
        chart.line(points, colour, deployment.words())
        chart.dots(points, colour)
        for factor, verdict in at:
            chart.interval(factor * rate, *verdict.interval, colour)
    chart.limit("y", config.slo_attainment, f"objective {percent(config.slo_attainment)}")
    return chart


def _devices_chart(result: PlanResult) -> Chart:
    chart = Chart(RATE, "devices", finding=f"colocated {crossing_words(result)}")
    return _with_both(chart, result, lambda found, _: float(result.num_devices(found.deployment)))


def _cost_chart(result: PlanResult) -> Chart:
    chart = Chart(RATE, "$ per million tokens")
    return _with_both(chart, result, lambda found, factor: result.price_per_million(found.deployment, factor))


def _with_both(chart: Chart, result: PlanResult, value: Callable[[Found, float], float]) -> Chart:
    """The chart, with a line for separate nodes and one for a colocated pool."""
    separate = [(row.factor, row.separate) for row in result.rows]
    colocated = [(row.factor, row.colocated) for row in result.rows]
    for colour, (name, pairs) in enumerate({"prefill and decode nodes": separate, "colocated pool": colocated}.items()):
        points = [(factor * result.load.requests_per_s, value(found, factor)) for factor, found in pairs if found]
        chart.line(points, colour, name)
        chart.dots(points, colour)
    return chart
