"""Metrics and information read from a server beside the load."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from common.errors import ConfigError
from scripts.load_tester.client import metrics_scraper
from scripts.load_tester.client.metrics_scraper import MetricsScraper, parse_metrics
from scripts.load_tester.client.server_info import fetch_server_info
from scripts.load_tester.config import LoadtestConfig

OK = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[bytes]]]:
    """Serve ``answer`` to the first request of every connection; yield the address and the received heads."""
    heads: list[bytes] = []
    sockets: list[socket.socket] = []

    def one(peer: socket.socket) -> None:
        with suppress(OSError), peer:
            heads.append(peer.recv(65536))
            answer(peer)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                sockets.append(listener.accept()[0])
                threading.Thread(target=one, args=(sockets[-1],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", heads
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            for peer in sockets:
                peer.close()


def drip(peer: socket.socket) -> None:
    """Send a response that ends with the connection, which never closes."""
    peer.sendall(OK + b"Connection: close\r\n\r\n")
    while True:
        peer.sendall(b"a 1\n")
        time.sleep(0.02)


def flood(peer: socket.socket) -> None:
    peer.sendall(OK + b"Connection: close\r\n\r\n")
    while True:
        peer.sendall(b"a 1\n" * 20_000)


async def scraped(config: LoadtestConfig, seconds: float) -> MetricsScraper:
    """Scrape for this many seconds; with 0, until there is a result, for at most a minute."""
    scraper = MetricsScraper(config)
    running = asyncio.create_task(scraper.run())
    await asyncio.sleep(seconds)
    for _ in range(3000 if not seconds else 0):
        if scraper.notes or scraper.since(0.0):
            break
        await asyncio.sleep(0.02)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return scraper


def scrape_for(config: LoadtestConfig, seconds: float = 0.0) -> MetricsScraper:
    return asyncio.run(scraped(config, seconds))


def test_a_page_that_never_ends_does_not_hold_up_the_end_of_a_run() -> None:
    with server(drip) as (url, _):
        found = scrape_for(LoadtestConfig(url=url), 0.3)
    assert found.since(0.0) == {}


@contextmanager
def deaf(takes: bool) -> Iterator[str]:
    """Address of a silent server: it accepts connections, or its backlog is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=16 if takes else 0) as listener:
        waiting = [socket.socket() for _ in range(0 if takes else 4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}/metrics"
        finally:
            for one in waiting:
                one.close()


@pytest.mark.parametrize(("scheme", "takes"), [("http", True), ("http", False), ("https", True)])
def test_a_silent_address_does_not_hold_up_the_end_of_a_run(
    scheme: str, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No response, no connection, no TLS handshake: a run that waited for any of them would hang."""
    monkeypatch.setattr("scripts.load_tester.client.server_info.TIMEOUT_S", 900.0)
    with deaf(takes) as address:
        found = scrape_for(LoadtestConfig(scrape=f"{scheme}://{address}"), 0.2)
    assert found.since(0.0) == {} and "nothing answered" in found.notes[0]


def test_an_endless_page_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_scraper, "MAX_PAGE", 1 << 20)
    with server(flood) as (url, _):
        found = scrape_for(LoadtestConfig(url=url, scrape=url))
    assert found.since(0.0) == {} and "no metrics (no usable response)" in found.notes[0]


def test_a_page_without_metrics_is_reported() -> None:
    page = b"<html>\xff\x00</html>"
    with server(lambda peer: peer.sendall(OK + b"Content-Length: %d\r\n\r\n" % len(page) + page)) as (url, _):
        found = scrape_for(LoadtestConfig(url=url, scrape=url + "/metrics"))
    assert found.since(0.0) == {} and found.notes == [f"--scrape {url}/metrics: no metrics on that page"]


def test_the_key_goes_only_to_the_server_under_test() -> None:
    page = OK + b"Content-Length: 4\r\n\r\na 1\n"
    with (
        server(lambda peer: peer.sendall(page)) as (own, mine),
        server(lambda peer: peer.sendall(page)) as (other, its),
    ):
        scrape_for(LoadtestConfig(url=own, api_key="s3cret"))
        found = scrape_for(LoadtestConfig(url=own, api_key="s3cret", scrape=other))
    assert b"s3cret" in mine[0] and b"s3cret" not in its[0]
    assert found.since(0.0)["a"][0][1] == 1


def test_a_long_run_keeps_an_even_selection_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_scraper, "MAX_ROWS", 4)
    scraper = MetricsScraper(LoadtestConfig(scrape_interval=1.0))
    for at in range(6):
        scraper._keep(float(at), {"a": 1.0 + at})
    assert [at for at, _ in scraper.since(0.0)["a"]] == [0, 2, 4, 5]
    assert scraper._interval_s == 2.0


def test_prometheus_text_is_read_without_buckets_and_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '# HELP a b\na_total 3\na_bucket{le="1"} 2\nb{x="y z"} 1.5e3\nc NaN\nd 1.2.3\nprocess_x 1\n'
    assert parse_metrics(text) == {"a_total": 3.0, 'b{x="y z"}': 1500.0}
    monkeypatch.setattr(metrics_scraper, "MAX_NAMES", 1)
    assert parse_metrics(text) == {"a_total": 3.0}


@pytest.mark.parametrize("answer", [flood, drip])
def test_a_server_with_an_endless_response_is_refused(
    answer: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.load_tester.client.server_info.TIMEOUT_S", 3.0)
    with server(answer) as (url, _), pytest.raises(ConfigError, match="does not end"):
        fetch_server_info(url, {})
