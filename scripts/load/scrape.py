"""The server's own metrics, read alongside the run from its Prometheus page.

Histogram buckets and what Python itself exports are left out; counters and gauges are kept as they are, one series for
each set of labels.
"""

import asyncio
import re
import time
from urllib.parse import urlsplit

from common.errors import ConfigError
from scripts.load.config import LoadtestConfig
from scripts.load.probe import get

LINE = re.compile(r"^([a-zA-Z_:][\w:]*(?:\{[^}]*\})?)\s+([-+\d.eE]+|NaN|[+-]Inf)")
LEFT_OUT = re.compile(r"^(python_|process_|go_)|_bucket\{|_created\b|_sum\b|_info\{")
MAX_SERIES = 400


class Scraper:
    """Reads until cancelled. ``notes`` says why there is nothing, if so."""

    def __init__(self, config: LoadtestConfig) -> None:
        self._config = config
        self._rows: list[tuple[float, dict[str, float]]] = []
        self.notes: list[str] = []

    async def run(self) -> None:
        """Read every ``--scrape-interval``; give up quietly where there are no metrics."""
        config = self._config
        if config.scrape == "none":
            return
        url = config.url if config.scrape == "auto" else config.scrape
        parts = urlsplit(url)
        path = "/metrics" if config.scrape == "auto" or parts.path in ("", "/") else ""
        while True:
            at = time.monotonic()
            try:
                status, body = await asyncio.to_thread(get, parts, path, config.api_key, config.verify_tls)
            except ConfigError:
                status, body = 0, b""
            if status == 200:
                self._rows.append((at, parse(body.decode(errors="replace"))))
            elif not self._rows:
                if config.scrape != "auto":
                    self.notes.append(f"--scrape {url}: no metrics (HTTP {status})")
                return
            await asyncio.sleep(max(0.0, at + config.scrape_interval - time.monotonic()))

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
    for line in text.splitlines():
        if line.startswith("#") or LEFT_OUT.search(line):
            continue
        sample = LINE.match(line)
        if sample and sample.group(2) not in ("NaN", "+Inf", "-Inf"):
            found[sample.group(1)] = float(sample.group(2))
    return found
