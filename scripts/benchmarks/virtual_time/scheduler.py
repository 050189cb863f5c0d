"""Cost of scheduling: the radix cache with a million tokens, a step of 256 decode rows, plans over 10,000 prompts.

The table shows cache operations, ``plan`` + ``commit`` of a full decode batch, and ``plan`` of a prefill node with
1,000 and 10,000 waiting requests under every policy (``scripts/benchmarks/virtual_time/policies.py``).

Each figure is the median (and 99th percentile) of many repetitions on one core, in microseconds. Beside it stand the
published figures of SGLang 0.5.23's Python and Rust trees on the same tree: 1,000 sequences with 50 shared prefixes of
256 tokens, page size 16. They were measured on another machine, so the ratio is only a guide. Baton packs tokens once
per request; that is a row of its own.
"""

import argparse
import gc
from collections.abc import Sequence
from functools import partial

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.tree_node import TOKEN_BYTES, pack
from common.node.loading.memory_plan import MAX_QUEUED
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.policies.factory import make_ordering
from common.step_plan import StepResult
from decode_node.scheduler import DecodeLimits, DecodeScheduler
from scripts.benchmarks.harness.options import comma_separated
from scripts.benchmarks.virtual_time.policies import ROWS, bench_plan, print_plans
from scripts.benchmarks.virtual_time.radix_tree import (
    CHAIN_NODES,
    LEAF_TOKENS,
    PAGE_SIZE,
    PROBE_TOKENS,
    Figure,
    Tree,
    figure,
    timed,
)

SHORTEST = ("--repeats=3", "--policies=fcfs", "--waiting=1000")
EVICT_TOKENS = 100_000
NUM_ROWS = 256
PLAN_MARK_US = 500.0


def bench_pack(tree: Tree, num_repeats: int) -> Figure:
    tokens = tuple(range(140_000, 140_000 + PROBE_TOKENS))
    return figure("pack 8,192 tokens (once per request)", [timed(lambda: pack(tokens)) for _ in range(num_repeats)])


def bench_insert(tree: Tree, num_repeats: int) -> Figure:
    times = []
    for _ in range(num_repeats):
        key = tree.fresh(PROBE_TOKENS)
        times.append(timed(partial(tree.cache.insert, key, tree.pages_for(key))))
        tree.cache.clear()
    return figure("insert 8,192 new tokens", times, python=20, rust=12)


def bench_insert_behind_chain(tree: Tree, num_repeats: int) -> Figure:
    times = []
    for _ in range(num_repeats):
        key = tree.fresh(PROBE_TOKENS)
        pages = tree.add_chain(key, CHAIN_NODES - 1)
        pages += tree.pages_for(key[len(pages) * PAGE_SIZE * TOKEN_BYTES :])
        times.append(timed(partial(tree.cache.insert, key, pages)))
        tree.cache.clear()
    return figure("insert 8,192 tokens, 15/16 there in 15 nodes", times)


def bench_match(tree: Tree, num_repeats: int) -> Figure:
    key = tree.fresh(PROBE_TOKENS)
    tree.add(key)
    copy = key[:-1] + key[-1:]  # equal, but another object
    times = [timed(lambda: tree.cache.match(copy)) for _ in range(num_repeats)]
    assert tree.cache.match(copy).num_tokens == PROBE_TOKENS
    tree.cache.clear()
    return figure("match 8,192 tokens in one node", times, python=28, rust=5)


def bench_match_chain(tree: Tree, num_repeats: int) -> Figure:
    key = tree.fresh(PROBE_TOKENS)
    tree.add_chain(key, CHAIN_NODES)
    times = [timed(lambda: tree.cache.match(key)) for _ in range(num_repeats)]
    match = tree.cache.match(key)
    assert (match.num_tokens, len(match.node.path())) == (PROBE_TOKENS, CHAIN_NODES)
    tree.cache.clear()
    return figure("match 8,192 tokens in a chain of 16 nodes", times, python=99, rust=9)


def bench_evict(tree: Tree, num_repeats: int) -> Figure:
    times = []
    num_pages = EVICT_TOKENS // PAGE_SIZE
    for _ in range(max(3, num_repeats // 20)):
        times.append(timed(lambda: tree.cache.evict(num_pages)))
        tree.grow(EVICT_TOKENS // LEAF_TOKENS)
    return figure("evict 100,000 tokens", times, python=724, rust=403)


def bench_step(num_steps: int, name: str = "fcfs", *, num_waiting: int = 0) -> Figure:
    """Measure a step of 256 decode rows: ``plan``, ``commit`` and ``grant``.

    Each row starts a new page every 16 steps, at different times. Waiting requests find no free pages.
    """
    max_new = num_steps + 8
    allocator = PageAllocator(
        NUM_ROWS * ((1_016 + max_new) // PAGE_SIZE + 1)
    )  # 256 rows fit to their ends, and no more
    limits = DecodeLimits(max_running=NUM_ROWS)
    cache = RadixCache(allocator, PAGE_SIZE)
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
    scheduler = DecodeScheduler(
        cache,
        allocator,
        limits=limits,
        ordering=make_ordering(ROWS[name], cache),
        eos_token_ids=(2,),
        is_connected=lambda source: False,
    )
    for number in range(NUM_ROWS):
        length = 1_000 + number % PAGE_SIZE
        prompt = tuple(range(number * 2_000, number * 2_000 + length))
        scheduler.submit(Request(f"r{number}", 0, prompt, sampling, tenant=f"t{number % 9}"), source="prefill")
    scheduler.grant(0.0)
    scheduler.take_effects()
    for key in list(scheduler.requests):
        scheduler.received(key, token=7)
    for number in range(NUM_ROWS, NUM_ROWS + num_waiting):
        scheduler.submit(_waiting(number), source="prefill")
    times = []
    for number in range(num_steps):
        result = StepResult(number + 1, (7,) * NUM_ROWS)
        times.append(timed(partial(run_step, scheduler, number * 0.01, result)))
    assert len(scheduler.requests) == NUM_ROWS + num_waiting
    assert sum(len(request.output) == num_steps + 1 for request in scheduler.requests.values()) == NUM_ROWS
    scheduler.check()
    waiting = f", {num_waiting:,} waiting" if num_waiting else ""
    return figure(f"256 decode rows{waiting}, {name}", times[1:], mark=PLAN_MARK_US)


def _waiting(number: int) -> Request:
    return Request(
        f"r{number}",
        0,
        tuple(range(number, number + 8_192)),
        SamplingParams(max_new_tokens=600),
        priority=-(number % 7),
        priority_class=("high", "normal", "low")[number % 3],
        arrived_at=number * 1e-6,
    )


def run_step(scheduler: DecodeScheduler, now: float, result: StepResult) -> None:
    scheduler.plan(now)
    scheduler.commit(result)
    scheduler.grant(now)


def measure(num_repeats: int) -> list[Figure]:
    """Measure all rows. The garbage collector is off meanwhile, as in ``timeit``."""
    tree = Tree()
    gc.collect()
    gc.disable()
    tree.lock_all()
    probes = (bench_pack, bench_insert, bench_insert_behind_chain, bench_match, bench_match_chain)
    figures = [probe(tree, num_repeats) for probe in probes]
    tree.unlock_all()
    figures.append(bench_evict(tree, num_repeats))
    tree.cache.check()
    tree.allocator.check()
    figures += [bench_step(max(20, num_repeats), name) for name in ("fcfs", "fair")]
    for name in ("fcfs", "fcfs+priorities", "fcfs+classes"):
        figures.append(bench_step(max(20, num_repeats // 4), name, num_waiting=MAX_QUEUED))
    gc.enable()
    return figures


def print_table(figures: Sequence[Figure]) -> None:
    heads = f"{'median':>8} {'p99':>8} {'S python':>9} {'S rust':>7} {'mark':>6}"
    print(f"{'microseconds':46} {heads}  gain")
    for row in figures:
        against = row.python_tree_us or row.mark_us
        gain = f"{against / row.median_us:.1f}x" if against else ""
        own = f"{row.median_us:8.1f} {row.p99_us:8.1f}"
        others = [f"{value:.0f}" if value else "" for value in (row.python_tree_us, row.rust_tree_us, row.mark_us)]
        print(f"{row.name:46} {own} {others[0]:>9} {others[1]:>7} {others[2]:>6}  {gain}")
    print("S: SGLang 0.5.23's trees, published for a Zen 5 machine. Gain: over its Python tree, or over the mark.")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=400, help="repetitions (%(default)s); evict: a twentieth")
    parser.add_argument(
        "--policies", type=comma_separated(str, among=ROWS), default=",".join(ROWS), help="of %(default)s"
    )
    parser.add_argument(
        "--waiting", type=comma_separated(int), default="1000,10000", help="queue lengths (%(default)s)"
    )


def run(options: argparse.Namespace) -> dict[str, float]:
    rows = measure(options.repeats)
    print_table(rows)
    gc.collect()
    gc.disable()
    plans = [
        bench_plan(name, ROWS[name], size, max(3, options.repeats // (10 if size < 10_000 else 40)))
        for name in options.policies
        for size in options.waiting
    ]
    gc.enable()
    print_plans(plans)
    figures = {f"{row.name}, us": row.median_us for row in rows}
    for plan in plans:
        figures[f"{plan.name}, {plan.num_waiting:,} waiting, plan us"] = plan.plan.median_us
        figures[f"{plan.name}, {plan.num_waiting:,} waiting, commit us"] = plan.commit.median_us
    return figures
