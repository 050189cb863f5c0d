"""Records the server's own metrics during the run, from its Prometheus page.

Counters and gauges are kept as they are, one series for each set of labels. Histogram buckets and the metrics of the
Python and Go runtimes are left out.
"""

import asyncio
import http.client
import re
import socket
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

from scripts.load_tester.client.request_headers import common_headers
from scripts.load_tester.client.server_info import connect
from scripts.load_tester.config import LoadtestConfig

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}\n]*\})?[ \t]+([-+\d.eE]+)(?=\s|$)", re.MULTILINE)
LEFT_OUT = ("_bucket", "_created", "_sum", "_info")
LEFT_OUT_KINDS = ("python_", "process_", "go_")
MAX_SERIES = 400
MAX_PAGE = 8 << 20  # bytes
MAX_NAMES = 5_000  # series of a page
MAX_ROWS = 1_000  # beyond, every second row is dropped, and pages are read half as often


class MetricsScraper:
    """Reads until cancelled; ``notes`` says why there are no metrics, if so."""

    def __init__(self, config: LoadtestConfig) -> None:
        self._config = config
        self._rows: list[tuple[float, dict[str, float]]] = []
        self._names: dict[str, str] = {}  # so that equal names are one string
        self._interval_s = config.scrape_interval
        self.notes: list[str] = []
        url = config.url if config.scrape == "auto" else config.scrape
        self._parts = urlsplit(url)
        is_page = config.scrape != "auto" and self._parts.path not in ("", "/")
        root = self._parts.path.rstrip("/").removesuffix("/v1")
        self._path = self._parts.path if is_page else root + "/metrics"
        self._path += f"?{self._parts.query}" if self._parts.query else ""
        is_own = self._parts.netloc == urlsplit(config.url).netloc  # the key goes to no other server
        self._headers = common_headers(config) if is_own else {}
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._is_over = False

    async def run(self) -> None:
        """Read every ``--scrape-interval``; stop quietly where there are no metrics."""
        config = self._config
        if config.scrape == "none":
            return
        try:
            while True:
                at = time.monotonic()
                status, row = await self._read_aside()
                if status == 200 and row:
                    self._keep(at, row)
                elif not self._rows:
                    if config.scrape != "auto":
                        why = {200: "on that page", 0: "(no usable response)"}.get(status, f"(HTTP {status})")
                        self.notes.append(f"--scrape {config.scrape}: no metrics {why}")
                    return
                await asyncio.sleep(max(0.0, at + self._interval_s - time.monotonic()))
        finally:
            if config.scrape != "auto" and not self._rows and not self.notes:
                self.notes.append(f"--scrape {config.scrape}: nothing answered before the run ended")
            self._is_over = True
            self._hang_up()

    async def _read_aside(self) -> tuple[int, dict[str, float]]:
        """Run ``_read`` in a daemon thread: connecting cannot be interrupted, and must not delay the end of a run."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[tuple[int, dict[str, float]]] = loop.create_future()

        def tell(result: tuple[int, dict[str, float]]) -> None:
            if not found.done():
                found.set_result(result)

        def read() -> None:
            result = self._read()
            with suppress(RuntimeError):  # the run is over, and the loop is closed
                loop.call_soon_threadsafe(tell, result)

        threading.Thread(target=read, name="scrape", daemon=True).start()
        return await found

    def _keep(self, at: float, row: dict[str, float]) -> None:
        known = self._names
        self._rows.append((at, {known.setdefault(name, name): value for name, value in row.items()}))
        if len(self._rows) > MAX_ROWS:
            del self._rows[1::2]
            self._interval_s *= 2

    def _hang_up(self) -> None:
        """Close the connection, which also ends the read of a thread that is still reading."""
        connection, self._connection = self._connection, None
        if connection:
            if self._socket:  # http.client drops it when a response lasts until the connection ends
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _read(self) -> tuple[int, dict[str, float]]:
        """Status and values of one page, over one kept-alive connection; status 0 without a usable response."""
        connection = self._connection
        try:
            if connection is None:
                self._connection = connection = connect(self._parts, self._config.verify_tls)
            if connection.sock is None:
                connection.connect()
            self._socket = connection.sock
            if self._is_over:  # the run ended while this connected
                raise OSError
            connection.request("GET", self._path, headers=self._headers)
            response = connection.getresponse()
            page = response.read(MAX_PAGE)
            if response.read(1):
                raise http.client.HTTPException("the page is too large")
            return response.status, parse_metrics(page.decode(errors="replace")) if response.status == 200 else {}
        except (OSError, http.client.HTTPException, ValueError, AttributeError):  # the last two: closed in the meantime
            if connection:
                connection.close()
            self._hang_up()  # the next read opens it again
            return 0, {}

    def since(self, start_at: float) -> dict[str, list[list[float]]]:
        """All series that are not always 0, as pairs of seconds and value."""
        names = dict.fromkeys(name for _, row in self._rows for name in row)
        found = {}
        for name in names:
            series = [[round(at - start_at, 3), row[name]] for at, row in self._rows if name in row]
            if any(value for _, value in series):
                found[name] = series
            if len(found) >= MAX_SERIES:
                break
        return found


def parse_metrics(text: str) -> dict[str, float]:
    """Parse samples of the Prometheus text format, by name and labels."""
    found: dict[str, float] = {}
    for line in LINE.finditer(text):
        name, labels, value = line.groups("")
        if len(found) == MAX_NAMES:
            break
        if not name.endswith(LEFT_OUT) and not name.startswith(LEFT_OUT_KINDS):
            with suppress(ValueError):  # looks like a number and is not one
                found[name + labels] = float(value)
    return found
