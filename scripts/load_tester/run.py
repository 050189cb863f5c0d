"""One run: plan, send, parse the responses, judge.

``run_load`` is the interface for programs such as benchmarks::

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

from common.config.options import check_unset
from common.errors import ConfigError
from scripts.load_tester.analysis import metrics, validity
from scripts.load_tester.analysis.output_check import compare_outputs, read_expected
from scripts.load_tester.analysis.records import RequestRecord, make_record
from scripts.load_tester.client.client_pool import ClientPool, LoadResult, num_clients_for, peak_load
from scripts.load_tester.client.ipc import Progress
from scripts.load_tester.client.metrics_scraper import MetricsScraper
from scripts.load_tester.client.request_headers import RequestHeaders, client_setup, common_headers
from scripts.load_tester.client.server_info import UNKNOWN_VOCAB, ServerInfo, fetch_server_info, flush_cache
from scripts.load_tester.config import LoadtestConfig, has_limits
from scripts.load_tester.reporting.report import Report, config_figures
from scripts.load_tester.workload.plan import Plan, make_plan
from scripts.load_tester.workload.planned_request import PlannedRequest, ideal_cached_tokens
from scripts.load_tester.workload.prompts import RequestBodies, Tokenizer
from scripts.load_tester.workload.request_classes import mean_load, request_classes_of
from scripts.load_tester.workload.session_sampling import make_rng

OnProgress = Callable[[Sequence[Progress], Plan], None]
NOT_STREAMED = "responses are not streamed: all tokens of a response count as received at its end"
FIGURES = 99  # the stream of the seed that bootstraps use


def _check_limits(config: LoadtestConfig, plan: Sequence[PlannedRequest]) -> None:
    """Check what the options ask for against the limits in a trace. Raises ConfigError."""
    if not config.stream and any(planned.slos for planned in plan):
        raise ConfigError(
            "--no-stream: lines of the trace have slo_ttft_ms or slo_itl_ms, but all tokens come at the end; use"
            " deadline_ms"
        )
    has_own = config.slos or has_limits(config.mix)
    if not has_own and not any(planned.slos or planned.deadline_ms is not None for planned in plan):
        check_unset(config, ("slo_attainment",), "needs a limit: neither the options nor the trace have any")


def run_load(
    config: LoadtestConfig, *, on_progress: OnProgress | None = None, server: ServerInfo | None = None, salt: int = 0
) -> Report:
    """Run a load test to its end.

    Args:
        config: one run; ``goodput_search`` does searches and sweeps.
        on_progress: called a few times a second with the state of each client process.
        server: the result of ``fetch_server_info``, if the server has been asked already.
        salt: runs with one seed and different salts have the same schedule and lengths but other tokens, so that no
            run finds the prompts of another in the server's cache.

    Raises ConfigError: the server does not answer, or the plan is impossible; ClientFailed: a process died.
    """
    with _interruptible():
        return asyncio.run(_Run(config, on_progress, salt).run(server))


class _Run:
    """The steps of a run, with what they share."""

    def __init__(self, config: LoadtestConfig, on_progress: OnProgress | None, salt: int) -> None:
        self._config = config
        self._salt = salt
        self._on_progress = on_progress
        self._began_at = time.monotonic()
        self._expected = read_expected(config)

    async def run(self, server: ServerInfo | None) -> Report:
        config = self._config
        headers = RequestHeaders(config)
        pool = ClientPool(
            client_setup(config),
            self._num_clients(),
            lambda planned: (headers.of(planned), prompts.body(planned)),
            self._forward_progress if self._on_progress else None,
        )
        try:
            await pool.start()  # the processes import while the plan is made here
            self._plan = make_plan(config)
            if config.trace:
                _check_limits(config, [planned for session in self._plan.sessions for planned in session])
            await self._fit(pool, headers)
            tokenizer = read_tokenizer(config.tokenizer) if config.tokenizer else None
            # Nothing is asked of the server before the user's files have been read.
            found = server or fetch_server_info(config.url, common_headers(config), verify_tls=config.verify_tls)
            if config.flush_cache:
                flush_cache(config.url, common_headers(config), verify_tls=config.verify_tls)
            if found.vocab_size is None and not config.vocab_size and config.sends_ids:
                self._plan.notes.append(UNKNOWN_VOCAB)
            prompts = self._prompts(found, tokenizer)
        except BaseException:
            await pool.close()
            raise
        scraper = MetricsScraper(config)
        scraping = asyncio.create_task(scraper.run())
        started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with _stopped_by_signal(pool):
            try:
                result = await pool.run(self._plan.sessions)
            finally:
                scraping.cancel()
                with suppress(asyncio.CancelledError):
                    await scraping
        return self._report(result, found, scraper, started_at)

    async def _fit(self, pool: ClientPool, headers: RequestHeaders) -> None:
        """Check the plan's tenants and fields, and start more processes if a trace needs them."""
        plan, is_trace = self._plan, self._config.trace is not None
        requests = [one for session in plan.sessions for one in session] if is_trace else []
        check_endpoint(self._config.endpoint, requests)
        drawn = (f"tenant-{number}" for number in range(self._config.tenants))
        headers.check({*drawn, *(one.tenant for one in plan.classes.values()), *(one.tenant for one in requests)})
        if is_trace and plan.is_open and not self._config.clients:
            await pool.grow(num_clients_for(*peak_load(requests), 0))

    def _num_clients(self) -> int:
        config = self._config
        if config.clients:
            return config.clients
        if config.concurrency or config.trace:
            return num_clients_for(0.0, 0.0, config.concurrency or 0)
        rate = max(max(phase.first, phase.last) for phase in config.profile.phases)
        requests, tokens = mean_load(request_classes_of(config))
        return num_clients_for(rate * requests, rate * tokens, 0)

    def _prompts(self, server: ServerInfo, tokenizer: Tokenizer | None) -> RequestBodies:
        config = self._config
        vocab = server.vocab
        if config.vocab_size:
            vocab = ServerInfo(None, config.vocab_size, "", {}).vocab
        seed = config.seed + (self._salt << 40)
        self._drawn = f"{seed} {vocab if config.sends_ids else _words_of(config)}"
        return RequestBodies(
            seed,
            vocab,
            config.endpoint,
            config.model or server.model,
            config.prompt == "text",
            tokenizer,
            config.stream,
            config.ignore_eos,
            config.return_token_ids or (bool(config.expect_file) and server.sends_ids(config.endpoint, config.stream)),
            config.body_fields,
            bool(config.tenant_header or config.tenant_keys),
        )

    def _forward_progress(self, progress: Sequence[Progress]) -> None:
        if self._on_progress:
            self._on_progress(progress, self._plan)

    def _report(self, result: LoadResult, server: ServerInfo, scraper: MetricsScraper, started_at: str) -> Report:
        config, plan = self._config, self._plan
        cpu_s = time.process_time()
        records = parse_results(result, self._drawn)
        parse_cpu_s = time.process_time() - cpu_s
        for record in records:  # client processes check the timeout only once a second
            if record.is_ok and record.ended_s - record.released_s > config.timeout_s:
                record.error = "timeout"
        begin_s, end_s = self._window(result, records)
        for record in records:
            is_before_cooldown = not config.cooldown_s or record.intended_s < end_s
            # A request in flight when the run was stopped has neither failed nor succeeded.
            is_ended = record.error != "halted"
            record.is_measured = record.intended_s >= begin_s and is_before_cooldown and is_ended
        measured = [record for record in records if record.is_measured]
        firsts = [record for record in records if record.turn == 0]
        sent_s = [record.sent_s for record in records if record.sent_s >= 0]
        num_events = sum(len(record.stamps_s) for record in records)
        client = validity.client_load(result, parse_cpu_s, num_events)
        arrivals = validity.arrival_check(records, config, plan.is_checked and plan.is_open, plan.is_open)
        missing = (plan.num_sessions or 0) - len(firsts) if plan.is_open and not result.was_stopped else 0
        reasons = validity.verdict(measured, arrivals, client, config, missing)
        if result.was_stopped:
            reasons.append("the run was stopped before its end")
        rng = make_rng(config.seed, FIGURES)
        tenants = metrics.groups(measured, "tenant", config.slos, plan.classes, rng)
        window = self._throughput_window(begin_s, end_s, records)
        return Report(
            config=config_figures(config),
            server={"model": config.model or server.model, "kind": server.kind, **server.details},
            started_at=started_at,
            notes=[*plan.notes, *scraper.notes, *([] if config.stream else [NOT_STREAMED])],
            length_s=result.ended_at - result.start_at,
            reasons=reasons,
            arrivals=arrivals,
            client=client,
            latency=metrics.latencies(measured, rng),
            throughput=metrics.throughput(records, *window),
            service=metrics.service(measured, config.slos, plan.classes)
            | {"goodput_per_s": metrics.goodput(records, config.slos, plan.classes, *window)},
            errors=metrics.errors(measured),
            classes=metrics.groups(measured, "class_name", config.slos, plan.classes, rng),
            tenants=tenants,
            fairness=metrics.fairness(tenants, measured, records, *window),
            caching=metrics.caching(measured),
            tokens=metrics.tokens(measured),
            stages=metrics.stages(measured, rng),
            outputs=compare_outputs(self._expected, records) if config.expect_file else {},
            scrape=scraper.since(result.start_at),
            num_requests=len(records),
            num_measured=len(measured),
            was_stopped=result.was_stopped,
            start_up_s=result.start_at - self._began_at + min(sent_s) if sent_s else None,
            rate=arrivals["intended_rate"],
            records=records,
        )

    def _window(self, result: LoadResult, records: list[RequestRecord]) -> tuple[float, float]:
        """First and last intended instant of measured requests."""
        config, plan = self._config, self._plan
        end_s = plan.seconds
        if end_s is None or not (plan.is_open or self._is_cut(records)):
            end_s = _last_token_s(records)
        if result.was_stopped:
            end_s = min(end_s, result.ended_at - result.start_at)
        return config.warmup_s, end_s - config.cooldown_s

    def _throughput_window(self, begin_s: float, end_s: float, records: list[RequestRecord]) -> tuple[float, float]:
        """The measured part of ``--duration``; where that does not end the load, until the last token.

        The time in which a request hangs until its timeout does not count.
        """
        if not self._is_cut(records) or end_s <= begin_s:
            end_s = max(end_s, _last_token_s([record for record in records if record.is_measured]))
        return begin_s, end_s

    def _is_cut(self, records: list[RequestRecord]) -> bool:
        """Whether ``--duration`` ended the load, and not the number of requests."""
        wanted = self._plan.num_wanted
        num_sessions = sum(record.turn == 0 for record in records)
        return self._config.duration_s is not None and (wanted is None or num_sessions < wanted)


def check_endpoint(endpoint: str, requests: Sequence[PlannedRequest]) -> None:
    """Raise ConfigError if lines of the user's own trace do not fit the endpoint."""
    for planned in requests:
        given = planned.extra or {}
        if "messages" in given and endpoint != "chat":
            raise ConfigError(f"--trace: a line has messages, not for --endpoint {endpoint}: use --endpoint chat")
        if "prompt" in given and endpoint == "chat":
            raise ConfigError("--trace: a line has a prompt, not for --endpoint chat: use --endpoint completions")


def _last_token_s(records: Sequence[RequestRecord]) -> float:
    """Time of the last output; without output, of the end of the last request."""
    stamps = [record.stamps_s[-1] for record in records if record.stamps_s]
    return max(stamps or [record.ended_s for record in records], default=0.0)


def _words_of(config: LoadtestConfig) -> str:
    """The words of prompts depend on this beside the seed: a chat template, and a tokenizer that trims."""
    trimmed = hashlib.sha256(_tokenizer_file(config.tokenizer).read_bytes()).hexdigest() if config.tokenizer else ""
    return f"{'chat' if config.endpoint == 'chat' else 'text'} {trimmed}"


def _tokenizer_file(path: str) -> Path:
    return Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)


def read_tokenizer(path: str) -> Tokenizer:
    """Load a tokenizer from a file or from a model's folder. Raises ConfigError: there is no tokenizer."""
    import tokenizers

    try:
        found: Tokenizer = tokenizers.Tokenizer.from_file(str(_tokenizer_file(path)))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"--tokenizer {path} must be a tokenizer.json or a folder with one: {error}") from None
    return found


def parse_results(result: LoadResult, drawn: str) -> list[RequestRecord]:
    """Parse all responses of a run, in the order of the plan; ``drawn`` goes to ``PlannedRequest.digest``."""
    planned = {one.index: one for one in result.planned}
    by_time = sorted(result.dones, key=lambda done: done.intended_at)
    ideal = ideal_cached_tokens(planned[done.index] for done in by_time)
    gc.disable()  # this makes many small objects without cycles
    try:
        records = [
            make_record(done, planned[done.index], result.start_at, cached, drawn)
            for done, cached in zip(by_time, ideal, strict=True)
        ]
    finally:
        gc.enable()
    return sorted(records, key=lambda record: record.index)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt blocking calls too; asyncio's own handler waits until the coroutine pauses."""

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


@contextmanager
def _stopped_by_signal(pool: ClientPool) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the run early, with a report of what there is."""
    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    for number in numbers:
        loop.add_signal_handler(number, pool.stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
