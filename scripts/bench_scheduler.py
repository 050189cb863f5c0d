"""What scheduling costs: the radix cache on a tree of a million tokens, and ``plan`` + ``commit`` of 256 decode rows.

Each figure is the median (and 99th percentile) of many repetitions on one core, in microseconds, beside the published
figures of SGLang 0.5.23's Python and Rust trees on the same tree: 1,000 sequences of 50 shared prefixes of 256 tokens,
page size 16. They were measured on another machine, so the ratio is a guide. Tokens are packed once per request in
Baton; that is a row of its own.
"""

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.new_token_ratio import NewTokenRatio, RatioConstants
from common.order import Order
from common.pages import Owner, PageBooks
from common.policy import make_policy
from common.radix import TOKEN_BYTES, RadixCache, TokenKey, pack
from common.request import Request
from common.sampling import SamplingParams
from common.step import StepResult
from decode_node.scheduler import DecodeScheduler, Limits

PAGE_SIZE = 16
NUM_PREFIXES = 50
PREFIX_TOKENS = 256
NUM_LEAVES = 1_000
LEAF_TOKENS = 1_008
PROBE_TOKENS = 8_192
CHAIN_NODES = 16
EVICT_TOKENS = 100_000
NUM_ROWS = 256
PLAN_MARK_US = 500.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table; times in microseconds, None where nobody has published one."""

    name: str
    median_us: float
    p99_us: float
    num_samples: int
    num_preempted: int
    python_tree_us: float | None = None
    rust_tree_us: float | None = None
    mark_us: float | None = None


class Sample(NamedTuple):
    """One repetition. A preempted one contains a time slice of some other process; it is counted, not left out."""

    wall_us: float
    is_preempted: bool


class Tree:
    """A cache holding 1,020,800 tokens, with room for what is tried on it."""

    def __init__(self) -> None:
        num_pages = (NUM_PREFIXES * PREFIX_TOKENS + NUM_LEAVES * LEAF_TOKENS + 2 * PROBE_TOKENS) // PAGE_SIZE
        self.books = PageBooks(num_pages)
        self.cache = RadixCache(self.books, PAGE_SIZE)
        self._random = np.random.default_rng(0)
        self._prefixes = [self.fresh(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
        self._num_leaves = 0
        self._locked = list(self.cache.nodes())
        self.grow(NUM_LEAVES)
        assert self.cache.num_pages * PAGE_SIZE == 1_020_800

    def grow(self, num_leaves: int) -> None:
        """Add requests of one of the shared prefixes and 1,008 new tokens each."""
        for _ in range(num_leaves):
            self.add(self._prefixes[self._num_leaves % NUM_PREFIXES] + self.fresh(LEAF_TOKENS))
            self._num_leaves += 1

    def fresh(self, num_tokens: int) -> TokenKey:
        """Packed random tokens of a vocabulary of 151,936."""
        return self._random.integers(0, 151_936, num_tokens).astype("<i4").tobytes()

    def pages_for(self, key: TokenKey) -> list[int]:
        pages = self.books.alloc(len(key) // (TOKEN_BYTES * PAGE_SIZE), Owner.REQUEST)
        assert pages is not None
        return pages

    def add(self, key: TokenKey) -> None:
        pages = self.pages_for(key)
        self.books.free(pages[: self.cache.insert(key, pages).first_adopted], Owner.REQUEST)

    def add_chain(self, key: TokenKey, num_nodes: int) -> list[int]:
        """Insert the first ``num_nodes`` sixteenths of a new run, one after the other as chunks are; their pages."""
        size = len(key) // CHAIN_NODES
        pages: list[int] = []
        for end in range(size, num_nodes * size + 1, size):
            pages += self.pages_for(key[:size])
            self.cache.insert(key[:end], pages)
        return pages

    def lock_all(self) -> None:
        """What is added from now on is all that ``cache.clear`` removes."""
        self._locked = list(self.cache.nodes())
        for node in self._locked:
            self.cache.lock(node)

    def unlock_all(self) -> None:
        for node in self._locked:
            self.cache.unlock(node)


def timed(work: Callable[[], object]) -> Sample:
    """One call on the wall clock."""
    lost = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    start = time.perf_counter_ns()
    work()
    elapsed = time.perf_counter_ns() - start
    return Sample(elapsed / 1e3, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw > lost)


def figure(name: str, samples: list[Sample], *others: float | None) -> Figure:
    ordered = sorted(sample.wall_us for sample in samples)
    num_preempted = sum(sample.is_preempted for sample in samples)
    p99 = ordered[int(len(ordered) * 0.99)]
    return Figure(name, statistics.median(ordered), p99, len(samples), num_preempted, *others)


def bench_pack(tree: Tree, num_repeats: int) -> Figure:
    tokens = tuple(range(140_000, 140_000 + PROBE_TOKENS))
    return figure("pack 8,192 tokens (once per request)", [timed(lambda: pack(tokens)) for _ in range(num_repeats)])


def bench_insert(tree: Tree, num_repeats: int) -> Figure:
    times = []
    for _ in range(num_repeats):
        key = tree.fresh(PROBE_TOKENS)
        times.append(timed(partial(tree.cache.insert, key, tree.pages_for(key))))
        tree.cache.clear()
    return figure("insert 8,192 new tokens", times, 20, 12)


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
    return figure("match 8,192 tokens in one node", times, 28, 5)


def bench_match_chain(tree: Tree, num_repeats: int) -> Figure:
    key = tree.fresh(PROBE_TOKENS)
    tree.add_chain(key, CHAIN_NODES)
    times = [timed(lambda: tree.cache.match(key)) for _ in range(num_repeats)]
    match = tree.cache.match(key)
    assert (match.num_tokens, len(match.node.path())) == (PROBE_TOKENS, CHAIN_NODES)
    tree.cache.clear()
    return figure("match 8,192 tokens in a chain of 16 nodes", times, 99, 9)


def bench_evict(tree: Tree, num_repeats: int) -> Figure:
    times = []
    num_pages = EVICT_TOKENS // PAGE_SIZE
    for _ in range(max(3, num_repeats // 20)):
        times.append(timed(lambda: tree.cache.evict(num_pages)))
        tree.grow(EVICT_TOKENS // LEAF_TOKENS)
    return figure("evict 100,000 tokens", times, 724, 403)


def bench_step(num_steps: int) -> Figure:
    """``plan`` and ``commit`` of 256 rows that decode; each enters a new page every 16 steps, at different times."""
    pages_each = (1_024 + num_steps) // PAGE_SIZE + 2
    books = PageBooks(NUM_ROWS * pages_each)
    ratio = NewTokenRatio(RatioConstants())
    limits = Limits(max_running=NUM_ROWS)
    cache = RadixCache(books, PAGE_SIZE)
    scheduler = DecodeScheduler(
        cache, books, limits=limits, order=Order(make_policy("fcfs", cache)), ratio=ratio, eos_token_ids=(2,)
    )
    for number in range(NUM_ROWS):
        length = 1_000 + number % PAGE_SIZE
        prompt = tuple(range(number * 2_000, number * 2_000 + length))
        scheduler.submit(Request(f"r{number}", 0, prompt, SamplingParams(max_new_tokens=num_steps + 8)))
    for granted in scheduler.admit(0.0):
        scheduler.received(granted.request.key, token=7)
    times = []
    for number in range(num_steps):
        result = StepResult(number + 1, (7,) * NUM_ROWS)
        times.append(timed(partial(plan_and_commit, scheduler, number * 0.01, result)))
    assert all(len(request.output) == num_steps + 1 for request in scheduler.running.values())
    assert len(scheduler.running) == NUM_ROWS
    scheduler.check()
    return figure("plan + commit, 256 decode rows", times[1:], None, None, PLAN_MARK_US)


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
    figures.append(bench_step(max(20, num_repeats)))
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
    options = parser.parse_args(argv)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    figures = measure(options.repeats)
    print_table(figures)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in figures], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
