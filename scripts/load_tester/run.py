"""One run: plan, send, read what came back, judge it.

``run_load`` is the door for programs (benchmarks use nothing else of this package)::

    report = run_load(LoadtestConfig(url="http://127.0.0.1:8000", rate="4", num_requests=100))
    report.is_valid, report.latency["ttft"]["p99"], report.records[0].stamps_s
"""

import asyncio
import datetime
import gc
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from scripts.load_tester.analysis import metrics, validity
from scripts.load_tester.analysis.output_check import compare_outputs, read_expected
from scripts.load_tester.analysis.records import Record, record_of
from scripts.load_tester.client.client_pool import Crew, Outcome, busiest, num_clients_for
from scripts.load_tester.client.ipc import Tick
from scripts.load_tester.client.metrics_scraper import Scraper
from scripts.load_tester.client.request_headers import Heads, own_headers, setup_of
from scripts.load_tester.client.server_info import UNKNOWN_VOCAB, Server, flush_cache, probe
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.files import Report, config_figures
from scripts.load_tester.workload.plan import Planned, ideal_cached
from scripts.load_tester.workload.prompts import Prompts, Tokenizer
from scripts.load_tester.workload.request_classes import kinds_of, mean_load
from scripts.load_tester.workload.session_sampling import rng_of
from scripts.load_tester.workload.workload import Plan, make_plan

OnTick = Callable[[Sequence[Tick], Plan], None]
NOT_STREAMED = "answers are not streamed: all tokens of one come at its end, so its first comes no sooner"
FIGURES = 99  # the stream of the seed that bootstraps use


def run_load(
    config: LoadtestConfig, *, on_tick: OnTick | None = None, server: Server | None = None, salt: int = 0
) -> Report:
    """Run a load test to its end.

    Args:
        config: ``rate`` must be one that can be run; searches and sweeps are
        ``scripts/load_tester/analysis/goodput_search.py``.
        on_tick: called a few times a second with the state of each client process.
        server: what ``probe`` found, if that has been asked already.
        salt: runs with the same seed and another salt have the same schedule and lengths, and other tokens, so that no
            run finds the prompts of one before it in the server's cache.

    Raises:
        ConfigError: the server does not answer, or the plan cannot be made.
        ClientFailed: a client process died.
    """
    with _interruptible():
        return asyncio.run(run_load_async(config, on_tick=on_tick, server=server, salt=salt))


async def run_load_async(
    config: LoadtestConfig, *, on_tick: OnTick | None = None, server: Server | None = None, salt: int = 0
) -> Report:
    """As ``run_load``, inside a running loop. Cancelling it ends the client processes."""
    load = _Load(config, on_tick, salt)
    return await load.run(server)


class _Load:
    """The steps of a run, with what they share."""

    def __init__(self, config: LoadtestConfig, on_tick: OnTick | None, salt: int) -> None:
        self._config = config
        self._salt = salt
        self._on_tick = on_tick
        self._began_at = time.monotonic()
        self._expected = read_expected(config)

    async def run(self, server: Server | None) -> Report:
        config = self._config
        setup, heads = setup_of(config), Heads(config)
        on_tick = self._tick if self._on_tick else None
        crew = Crew(setup, self._num_clients(), lambda planned: (heads.of(planned), prompts.body(planned)), on_tick)
        try:
            await crew.start()  # they import while we think
            found = server or probe(config.url, own_headers(config), verify_tls=config.verify_tls)
            if config.flush_cache:
                flush_cache(config.url, own_headers(config), verify_tls=config.verify_tls)
            self._plan = make_plan(config)
            await self._fit(crew, heads)
            if found.vocab_size is None and not config.vocab_size and config.sends_ids:
                self._plan.notes.append(UNKNOWN_VOCAB)
            prompts = self._prompts(found)
        except BaseException:
            await crew.close()
            raise
        scraper = Scraper(config)
        scraping = asyncio.create_task(scraper.run())
        started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with _halted_by_signal(crew):
            try:
                outcome = await crew.run(self._plan.chains)
            finally:
                scraping.cancel()
                with suppress(asyncio.CancelledError):
                    await scraping
        return self._report(outcome, found, scraper, started_at)

    async def _fit(self, crew: Crew, heads: Heads) -> None:
        """Now that the plan is known: can its tenants be named, and does a trace need more processes?"""
        plan, is_trace = self._plan, self._config.trace is not None
        requests = [one for chain in plan.chains for one in chain] if is_trace else []
        check_endpoint(self._config.endpoint, requests)
        heads.check({*(kind.tenant for kind in plan.kinds.values()), *(one.tenant for one in requests)})
        if is_trace and plan.is_open and not self._config.clients:
            await crew.grow(num_clients_for(*busiest(requests), 0))

    def _num_clients(self) -> int:
        config = self._config
        if config.clients:
            return config.clients
        if config.concurrency or config.trace:
            return num_clients_for(0.0, 0.0, config.concurrency or 0)
        rate = max(max(leg.first, leg.last) for leg in config.profile.legs)
        requests, tokens = mean_load(kinds_of(config))
        return num_clients_for(rate * requests, rate * tokens, 0)

    def _prompts(self, server: Server) -> Prompts:
        config = self._config
        tokenizer = read_tokenizer(config.tokenizer) if config.tokenizer else None
        is_compared = bool(config.expect_file or config.save_outputs)
        vocab = server.vocab
        if config.vocab_size:
            vocab = Server(None, config.vocab_size, "", {}).vocab
        seed = config.seed + (self._salt << 40)
        self._drawn = f"{seed} {vocab if config.sends_ids else _words_of(config)}"
        return Prompts(
            seed,
            vocab,
            config.endpoint,
            config.model or server.model,
            config.prompt == "text",
            tokenizer,
            config.stream,
            config.ignore_eos,
            config.return_token_ids or (is_compared and server.sends_ids(config.endpoint, config.stream)),
            config.body_fields,
            bool(config.tenant_header or config.tenant_keys),
        )

    def _tick(self, ticks: Sequence[Tick]) -> None:
        if self._on_tick:
            self._on_tick(ticks, self._plan)

    def _report(self, outcome: Outcome, server: Server, scraper: Scraper, started_at: str) -> Report:
        config, plan = self._config, self._plan
        cpu_s = time.process_time()
        records = records_of(outcome, self._drawn)
        parse_cpu_s = time.process_time() - cpu_s
        for record in records:  # clients look only now and then at what has taken too long
            if record.is_ok and record.ended_s - record.released_s > config.timeout_s:
                record.error = "timeout"
        begin_s, end_s, is_open = self._window(outcome, records)
        for record in records:
            is_before_cooldown = not config.cooldown_s or record.intended_s < end_s
            # What was under way when the run was stopped has neither failed nor succeeded.
            is_ended = record.error != "halted"
            record.is_measured = record.intended_s >= begin_s and is_before_cooldown and is_ended
        measured = [record for record in records if record.is_measured]
        firsts = [record for record in records if record.turn == 0]
        sent_s = [record.sent_s for record in records if record.sent_s >= 0]
        num_events = sum(len(record.stamps_s) for record in records)
        client = validity.client_load(outcome, parse_cpu_s, num_events)
        arrivals = validity.arrival_check(records, config, plan.is_checked and is_open, is_open)
        missing = (plan.num_chains or 0) - len(firsts) if is_open and not outcome.was_halted else 0
        reasons = validity.verdict(measured, arrivals, client, config, missing)
        if outcome.was_halted:
            reasons.append("the run was stopped before its end")
        rng = rng_of(config.seed, FIGURES)
        tenants = metrics.groups(measured, "tenant", config.slos, plan.kinds, rng)
        window = self._throughput_window(begin_s, end_s, is_open, records)
        return Report(
            config=config_figures(config),
            server={"model": server.model, "kind": server.kind, **server.details},
            started_at=started_at,
            notes=[*plan.notes, *scraper.notes, *([] if config.stream else [NOT_STREAMED])],
            length_s=outcome.ended_at - outcome.start_at,
            reasons=reasons,
            arrivals=arrivals,
            client=client,
            latency=metrics.latencies(measured, rng),
            throughput=metrics.throughput(records, *window),
            service=metrics.service(measured, config.slos, plan.kinds, window[1] - window[0]),
            errors=metrics.errors(measured),
            classes=metrics.groups(measured, "class_name", config.slos, plan.kinds, rng),
            tenants=tenants,
            fairness=metrics.fairness(tenants, measured, records, *window),
            caching=metrics.caching(measured),
            tokens=metrics.tokens(measured),
            stages=metrics.stages(measured, rng),
            outputs=compare_outputs(self._expected, records) if config.expect_file else {},
            scrape=scraper.since(outcome.start_at),
            num_requests=len(records),
            num_measured=len(measured),
            was_stopped=outcome.was_halted,
            start_up_s=outcome.start_at - self._began_at + min(sent_s) if sent_s else None,
            rate=arrivals["intended_rate"],
            records=records,
        )

    def _window(self, outcome: Outcome, records: list[Record]) -> tuple[float, float, bool]:
        """Between which intended instants requests are measured."""
        config, plan = self._config, self._plan
        end_s = plan.seconds
        if end_s is None:
            end_s = _last_token_s(records)
        if outcome.was_halted:
            end_s = min(end_s, outcome.ended_at - outcome.start_at)
        return config.warmup_s, end_s - config.cooldown_s, plan.is_open

    def _throughput_window(
        self, begin_s: float, end_s: float, is_open: bool, records: list[Record]
    ) -> tuple[float, float]:
        """With a duration: the measured part of it. Otherwise until the last token, as other tools count; but one
        request that hangs until its time-out does not make minutes of it."""
        if self._config.duration_s is None or end_s <= begin_s:
            end_s = max(end_s, _last_token_s([record for record in records if record.is_measured]))
        return begin_s, end_s


def check_endpoint(endpoint: str, requests: Sequence[Planned]) -> None:
    """Raises ConfigError for what the user's own file asks of an endpoint that does not know it."""
    for planned in requests:
        given = planned.extra or {}
        if "messages" in given and endpoint != "chat":
            raise ConfigError(f"--trace: a line has messages: --endpoint chat takes those, not {endpoint}")
        if "prompt" in given and endpoint == "chat":
            raise ConfigError("--trace: a line has a prompt: --endpoint completions takes those, not chat")


def _last_token_s(records: Sequence[Record]) -> float:
    """When the last output came; without any, when the last request ended."""
    stamps = [record.stamps_s[-1] for record in records if record.stamps_s]
    return max(stamps or [record.ended_s for record in records], default=0.0)


def _words_of(config: LoadtestConfig) -> str:
    """What words follow from beside the seed: chats go through a template, and a tokenizer trims."""
    trimmed = hashlib.sha256(_tokenizer_file(config.tokenizer).read_bytes()).hexdigest() if config.tokenizer else ""
    return f"{'chat' if config.endpoint == 'chat' else 'text'} {trimmed}"


def _tokenizer_file(path: str) -> Path:
    return Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)


def read_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a file, or of a model's folder.

    Raises:
        ConfigError: it is none.
    """
    import tokenizers

    try:
        found: Tokenizer = tokenizers.Tokenizer.from_file(str(_tokenizer_file(path)))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"--tokenizer {path} is no tokenizer.json, nor a folder with one: {error}") from None
    return found


def records_of(outcome: Outcome, drawn: str) -> list[Record]:
    """All requests of a run, in the order of the plan, read; for ``drawn`` see ``Planned.digest``."""
    planned = {one.index: one for one in outcome.planned}
    by_time = sorted(outcome.dones, key=lambda done: done.intended_at)
    ideal = ideal_cached(planned[done.index] for done in by_time)
    gc.disable()  # many small objects, none of them in cycles
    try:
        records = [
            record_of(done, planned[done.index], outcome.start_at, cached, drawn)
            for done, cached in zip(by_time, ideal, strict=True)
        ]
    finally:
        gc.enable()
    return sorted(records, key=lambda record: record.index)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C while the server is asked about itself, or a plan is made, counts at once: asyncio's own handler would
    wait until the coroutine pauses."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT)
    is_mine = usual is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_mine:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if is_mine:
            signal.signal(signal.SIGINT, usual)


class _halted_by_signal:
    """While inside, Ctrl-C and SIGTERM end the run early, with a report of what there is."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._loop = asyncio.get_running_loop()
        self._signals: list[int] = []

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._crew.halt)
                self._signals.append(number)

    def __exit__(self, *error: Any) -> None:
        for number in self._signals:
            self._loop.remove_signal_handler(number)
