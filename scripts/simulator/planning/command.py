"""``simulate --plan``: the load and the choices from the options, progress, and the report."""

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.errors import ConfigError, RequestError
from gateway.requests.admission.priority import PriorityResolver
from scripts.load_tester.output_files import say
from scripts.load_tester.reporting.formats import percent
from scripts.load_tester.workload.plan import make_plan
from scripts.load_tester.workload.planned_request import PlannedRequest
from scripts.simulator.client import priority_class_of
from scripts.simulator.config import POOL_TOKENS, SimulateConfig
from scripts.simulator.hardware.node_model import NodeModel, find_hardware
from scripts.simulator.planning.deployment import Deployment
from scripts.simulator.planning.estimate import LoadSize
from scripts.simulator.planning.evaluation import Evaluator
from scripts.simulator.planning.planner import Choices, Planner, PlanResult
from scripts.simulator.planning.report import plan_figures, plan_lines
from scripts.simulator.planning.search import Goal
from scripts.simulator.planning.verdict import Verdict
from scripts.simulator.planning.windows import seconds_of, trace_of, windows_of
from scripts.simulator.report import write_report

CHUNKS, BATCH_LIMITS = (8_192, 2_048), (256, 64)
#: A simulation of one deployment is bounded by the load, not by the number of nodes tried.
MAX_DEVICES = 4_096


class PlanProgress:
    """Shows each evaluation on standard error, if that is a terminal."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._num_done = 0

    def __call__(self, deployment: Deployment, factor: float, verdict: Verdict) -> None:
        self._num_done += 1
        if self._is_shown:
            load = f" at {factor:.3g} times the load" if factor != 1.0 else ""
            words = (
                f"{self._num_done} simulated; {deployment.words()}{load}: {percent(verdict.share)} within objectives"
            )
            print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_shown and self._num_done:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def plan_command(config: SimulateConfig) -> int:
    """Search, print and write; return the exit status: 1 if nothing holds the objectives, or a file is not written."""
    result, verdicts = make_service_plan(config)

    def page() -> str:
        from scripts.simulator.planning.page import plan_page

        return plan_page(result, config, verdicts)

    has_json = write_report(config.json, "--json", lambda: json.dumps(plan_figures(result, config), indent=2) + "\n")
    has_page = write_report(config.html, "--html", page)
    say(*plan_lines(result, config))
    return 0 if result.chosen and has_json and has_page else 1


def make_service_plan(config: SimulateConfig) -> tuple[PlanResult, Mapping[tuple[Deployment, float], Verdict]]:
    """Search for a plan; also returns everything that was simulated for it."""
    windows = windows_of(config, num_windows=config.plan_windows, num_requests=config.plan_requests)
    plans = [make_plan(window, trace_of(window)) for window in windows]
    if not any(plan.seconds for plan in plans):
        raise ConfigError(
            "--plan needs requests at different instants of a window: raise --plan-requests, or lower --plan-windows "
            "or --burst-size"
        )
    span_s = sum(seconds_of(window, plan.num_sessions or 0) for window, plan in zip(windows, plans, strict=True))
    load = LoadSize.of(plans, span_s, config.slos)
    goal = Goal(config.slo_attainment, config.plan_confidence, MAX_DEVICES)
    choices = choices_of(config)
    pool = config.max_total_tokens or max(node.pool_tokens for node in choices.nodes.values())
    _check_requests(config, [one for plan in plans for session in plan.sessions for one in session], pool)
    progress = PlanProgress(config.progress and sys.stderr.isatty())
    processes = config.plan_processes or os.cpu_count() or 1
    try:
        with Evaluator(windows, goal, num_processes=processes, on_result=progress) as evaluate:
            return Planner(evaluate, load, choices, goal=goal).plan(), evaluate.known
    finally:
        progress.clear()


def _check_requests(config: SimulateConfig, requests: Sequence[PlannedRequest], pool: int) -> None:
    """Raise ConfigError if so many requests are refused that no number of nodes helps.

    Args:
        pool: tokens of the largest pool of a node.
    """
    context = config.max_context
    priorities = PriorityResolver(config)
    refusals: Counter[str] = Counter()
    for one in requests:
        try:
            num_tokens = one.num_input + (config.max_new_tokens or one.num_output)
            if num_tokens > context:
                refusals[f"longer than the context of {context:,} tokens: raise --context-length, or shorten them"] += 1
            elif num_tokens > pool:
                refusals[f"longer than a pool of {pool:,} tokens: raise --max-total-tokens, or shorten them"] += 1
            else:
                priorities.assign((), one.priority, priority_class_of(one, config.class_weights))
        except RequestError as error:
            refusals[f"refused: {error.message}"] += 1
    if refusals.total() > (1 - config.slo_attainment) * len(requests):
        ((reason, count),) = refusals.most_common(1)
        raise ConfigError(f"--plan: {count:,} of {len(requests):,} requests are {reason}")


def choices_of(config: SimulateConfig) -> Choices:
    """Everything that the options leave open."""
    default = SimulateConfig
    prefill_tps: tuple[int, ...] = (1,)
    decode_tps: tuple[int, ...] = (1,)
    if config.hardware is None:
        costs = config.costs
        node = NodeModel(costs, config.kv_bytes_per_token, config.max_total_tokens or POOL_TOKENS, 1, 0.0)
        nodes = {1: node}
    else:
        hardware = find_hardware(config.hardware, config.model)
        fitting = tuple(hardware.tensor_parallel_sizes())
        prefill_tps = (config.prefill_tp,) if config.prefill_tp != default.prefill_tp else fitting
        decode_tps = (config.decode_tp,) if config.decode_tp != default.decode_tp else fitting
        nodes = {tp: hardware.node(tp) for tp in prefill_tps}
        nodes |= {tp: hardware.node(tp, flag="--decode-tp") for tp in decode_tps}
    if config.price_per_hour is not None:
        price = config.price_per_hour
        nodes = {tp: replace(node, price_per_hour=price * node.num_devices) for tp, node in nodes.items()}
    chunk, limit, local = config.chunked_prefill_size, config.max_running_requests, config.local_prefill
    page = config.page_size
    return Choices(
        nodes,
        prefill_tps,
        decode_tps,
        chunks=(tuple(one for one in CHUNKS if one >= page) or (page,)) if chunk is None else (chunk,),
        batch_limits=BATCH_LIMITS if limit is None else (limit,),
        local_prefills=("never", "auto") if local == "never" else (local,),
        page_size=page,
    )
