"""The server's own metrics, read alongside the run from its Prometheus page.

Histogram buckets and what Python itself exports are left out; counters and gauges are kept as they are, one series for
each set of labels.
"""

import asyncio
import http.client
import re
import time
from contextlib import suppress
from urllib.parse import urlsplit

from scripts.load.config import LoadtestConfig
from scripts.load.probe import connect

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}\n]*\})?[ \t]+([-+\d.eE]+)(?=\s|$)", re.MULTILINE)
LEFT_OUT = ("_bucket", "_created", "_sum", "_info")
LEFT_OUT_KINDS = ("python_", "process_", "go_")
MAX_SERIES = 400


class Scraper:
    """Reads until cancelled. ``notes`` says why there is nothing, if so."""

    def __init__(self, config: LoadtestConfig) -> None:
        self._config = config
        self._rows: list[tuple[float, dict[str, float]]] = []
        self.notes: list[str] = []
        url = config.url if config.scrape == "auto" else config.scrape
        self._parts = urlsplit(url)
        is_page = config.scrape != "auto" and self._parts.path not in ("", "/")
        root = self._parts.path.rstrip("/").removesuffix("/v1")
        self._path = self._parts.path if is_page else root + "/metrics"
        self._headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._connection: http.client.HTTPConnection | None = None

    async def run(self) -> None:
        """Read every ``--scrape-interval``; give up quietly where there are no metrics."""
        config = self._config
        if config.scrape == "none":
            return
        try:
            while True:
                at = time.monotonic()
                status, body = await asyncio.to_thread(self._get)
                if status == 200:
                    self._rows.append((at, parse(body.decode(errors="replace"))))
                elif not self._rows:
                    if config.scrape != "auto":
                        self.notes.append(f"--scrape {config.scrape}: no metrics (HTTP {status})")
                    return
                await asyncio.sleep(max(0.0, at + config.scrape_interval - time.monotonic()))
        finally:
            if self._connection:
                self._connection.close()

    def _get(self) -> tuple[int, bytes]:
        """Status and page, over one connection for the whole run if the server lets it; status 0 if nobody answers."""
        try:
            if self._connection is None:
                self._connection = connect(self._parts, self._config.verify_tls)
            self._connection.request("GET", self._path, headers=self._headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            if self._connection:
                self._connection.close()  # the next try opens it again
            return 0, b""

    def since(self, start_at: float) -> dict[str, list[list[float]]]:
        """All series that ever changed or are not 0, as pairs of seconds and value."""
        names = dict.fromkeys(name for _, row in self._rows for name in row)
        found = {}
        for name in names:
            series = [[round(at - start_at, 3), row[name]] for at, row in self._rows if name in row]
            if any(value for _, value in series):
                found[name] = series
            if len(found) >= MAX_SERIES:
                break
        return found


def parse(text: str) -> dict[str, float]:
    """Samples of Prometheus' text format by name and labels."""
    found = {}
    for name, labels, value in LINE.findall(text):
        if not name.endswith(LEFT_OUT) and not name.startswith(LEFT_OUT_KINDS):
            with suppress(ValueError):  # looks like a number and is none
                found[name + labels] = float(value)
    return found
