"""What scheduling costs: the radix cache on a million tokens, a step of 256 decode rows, plans over 10,000 prompts.

The cache is measured on its tree, ``plan`` + ``commit`` on a full batch, and ``plan`` of a prefill node over 1,000 and
10,000 waiting requests under every policy (``scripts/benchmarks/policies.py``).

Each figure is the median (and 99th percentile) of many repetitions on one core, in microseconds, beside the published
figures of SGLang 0.5.23's Python and Rust trees on the same tree: 1,000 sequences of 50 shared prefixes of 256 tokens,
page size 16. They were measured on another machine, so the ratio is a guide. Tokens are packed once per request in
Baton; that is a row of its own.
"""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import TOKEN_BYTES, RadixCache, pack
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.new_token_ratio import NewTokenRatio, RatioConstants
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.factory import make_policy
from common.step_plan import StepResult
from decode_node.scheduler import DecodeScheduler, Limits
from scripts.benchmarks.policies import bench_lpm, bench_plans, measured_steps, print_plans, print_steps
from scripts.benchmarks.tree import CHAIN_NODES, LEAF_TOKENS, PAGE_SIZE, PROBE_TOKENS, Figure, Tree, figure, timed

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
    copy = key[:-1] + key[-1:]  # equal, but not the same object
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


def bench_step(num_steps: int, policy: str = "fcfs") -> Figure:
    """``plan`` and ``commit`` of 256 rows that decode; each enters a new page every 16 steps, at different times."""
    pages_each = (1_024 + num_steps) // PAGE_SIZE + 2
    books = PageAllocator(NUM_ROWS * pages_each)
    ratio = NewTokenRatio(RatioConstants())
    limits = Limits(max_running=NUM_ROWS)
    cache = RadixCache(books, PAGE_SIZE)
    scheduler = DecodeScheduler(
        cache,
        books,
        limits=limits,
        order=RequestOrdering(make_policy(policy, cache)),
        ratio=ratio,
        eos_token_ids=(2,),
        is_connected=lambda source: False,
    )
    for number in range(NUM_ROWS):
        length = 1_000 + number % PAGE_SIZE
        prompt = tuple(range(number * 2_000, number * 2_000 + length))
        scheduler.submit(
            Request(f"r{number}", 0, prompt, SamplingParams(max_new_tokens=num_steps + 8), tenant=f"t{number % 9}"),
            source="prefill",
        )
    scheduler.grant(0.0)
    scheduler.take_effects()
    for key in list(scheduler.requests):
        scheduler.received(key, token=7)
    times = []
    for number in range(num_steps):
        result = StepResult(number + 1, (7,) * NUM_ROWS)
        times.append(timed(partial(plan_and_commit, scheduler, number * 0.01, result)))
    assert len(scheduler.requests) == NUM_ROWS
    assert all(len(request.output) == num_steps + 1 for request in scheduler.requests.values())
    scheduler.check()
    return figure(f"plan + commit, 256 decode rows, {policy}", times[1:], mark=PLAN_MARK_US)


def plan_and_commit(scheduler: DecodeScheduler, now: float, result: StepResult) -> None:
    scheduler.plan(now)
    scheduler.commit(result)


def measure(num_repeats: int) -> list[Figure]:
    """All rows. The garbage collector is off while times are taken, as in ``timeit``."""
    tree = Tree()
    gc.collect()
    gc.disable()
    tree.lock_all()
    probes = (bench_pack, bench_insert, bench_insert_behind_chain, bench_match, bench_match_chain)
    figures = [probe(tree, num_repeats) for probe in probes]
    tree.unlock_all()
    figures.append(bench_evict(tree, num_repeats))
    tree.cache.check()
    tree.books.check()
    figures += [bench_step(max(20, num_repeats), policy) for policy in ("fcfs", "fair")]
    figures += bench_lpm(num_repeats)
    gc.enable()
    return figures


def print_table(figures: Sequence[Figure]) -> None:
    heads = f"{'median':>8} {'p99':>8} {'preempted':>10} {'S python':>9} {'S rust':>7} {'mark':>6}"
    print(f"{'microseconds':46} {heads}  gain")
    for row in figures:
        against = row.python_tree_us or row.mark_us
        gain = f"{against / row.median_us:.1f}x" if against else ""
        own = f"{row.median_us:8.1f} {row.p99_us:8.1f} {row.num_preempted:>4} /{row.num_samples:>4}"
        others = [f"{value:.0f}" if value else "" for value in (row.python_tree_us, row.rust_tree_us, row.mark_us)]
        print(f"{row.name:46} {own} {others[0]:>9} {others[1]:>7} {others[2]:>6}  {gain}")
    print("S: SGLang 0.5.23's trees as published for a Zen 5 machine. Gain: over its Python tree, or over the mark.")
    print(
        "Preempted: repetitions during which another process had the core; they are in the figures, most of all in p99."
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench scheduler", description=__doc__)
    parser.add_argument("--repeats", type=int, default=400, help="repetitions of each row (evict: a twentieth)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--policy", action="append", default=[], help="only plans under this policy; may be repeated")
    parser.add_argument(
        "--step", action="append", default=[], metavar="NAME:MS", help="a step time to print beside the measured ones"
    )
    parser.add_argument("--no-steps", action="store_true", help="do not run the small model for step times")
    options = parser.parse_args(argv)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    figures = [] if options.policy else measure(options.repeats)
    if figures:
        print_table(figures)
    gc.collect()
    gc.disable()
    plans = list(bench_plans(max(8, options.repeats // 10), tuple(options.policy)))
    gc.enable()
    print_plans(plans)
    print_steps({} if options.no_steps else measured_steps(max(3, options.repeats // 20)), options.step)
    if options.json:
        rows = {"figures": [asdict(row) for row in figures], "plans": [asdict(row) for row in plans]}
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
