"""The report of a run, and its JSON.

``--json`` writes ``Report.to_dict`` and ``--compare`` reads it: every figure, and the samples that comparisons need.
All times are seconds; ``schema`` rises when a field changes its meaning.
"""

import shlex
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from common.config.options import options_of
from common.errors import ConfigError
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.output_files import TO_STDOUT

SCHEMA = 1
MAX_SAMPLES = 20_000


@dataclass
class Report:
    """The figures of one run.

    Attributes:
        reasons: why the run is invalid; empty if it is valid.
        arrivals, client: see ``validity.arrival_check``, ``validity.client_load``.
        latency, throughput, service, errors, classes, tenants, fairness, caching, tokens, stages: see ``metrics``.
        outputs: with --expect-file, see ``output_check.compare_outputs``.
        scrape: the server's own series, ``{name: [[seconds, value], ...]}``.
        was_stopped: whether Ctrl-C or SIGTERM ended it early.
        start_up_s: from the command's start to the first request; None if none was sent.
        records: one for each request; not in the JSON.
    """

    config: Figures
    server: Figures
    started_at: str
    notes: list[str]
    length_s: float
    reasons: list[str]
    arrivals: Figures
    client: Figures
    latency: Figures
    throughput: Figures
    service: Figures
    errors: Figures
    classes: Figures
    tenants: Figures
    fairness: Figures
    caching: Figures
    tokens: Figures
    stages: Figures
    outputs: Figures
    scrape: dict[str, list[list[float]]]
    num_requests: int
    num_measured: int
    was_stopped: bool = False
    start_up_s: float | None = None
    rate: float | None = None
    records: list[RequestRecord] = field(default_factory=list, repr=False)

    @property
    def is_valid(self) -> bool:
        return not self.reasons

    @property
    def target(self) -> float:
        """The share of requests that should be good (``--slo-attainment``)."""
        return float(self.config["slo_attainment"])

    @property
    def all_failed(self) -> bool:
        return bool(self.errors["count"] == self.num_measured > 0)

    @property
    def measured(self) -> list[RequestRecord]:
        return [record for record in self.records if record.is_measured]

    def to_dict(self) -> Figures:
        """The JSON of the report: no records, but samples of the measured requests."""
        found = {own.name: getattr(self, own.name) for own in fields(self) if own.name != "records"}
        good = [record for record in self.measured if record.is_ok and record.stamps_s]
        good = good[:: len(good) // MAX_SAMPLES + 1]  # spread over the whole run
        step = sum(len(record.counts) for record in good) // MAX_SAMPLES + 1  # the gaps of a request stay together
        samples = {
            "ttft": [round(record.ttft_s, 6) for record in good],
            "e2e": [round(record.e2e_s, 6) for record in good],
            "tpot": [round(tpot, 6) for record in good if (tpot := record.tpot_s) is not None],
            "itl": [[round(gap, 6) for gap in record.gaps_s] for record in good[::step]],
        }
        return {"schema": SCHEMA, "is_valid": self.is_valid, **found, "samples": samples}


def config_figures(config: LoadtestConfig) -> Figures:
    """The configuration without secrets."""
    secrets = {name for name, found in options_of(LoadtestConfig).items() if found.is_secret}
    shown = {name: value for name, value in asdict(config).items() if name not in secrets}
    if shown.get("header"):
        shown["header"] = shown["header"].split(":")[0] + ": ..."
    return shown


def command_of(figures: Figures) -> str:
    """The command line of a run, from its configuration without secrets."""
    words = ["./scripts/loadtest"]
    for name, found in options_of(LoadtestConfig).items():
        value = figures.get(name, found.default)
        if value is None or value == found.default or found.is_secret:
            continue
        if found.kind is bool:
            words.append(found.flag if value else f"--no-{found.flag[2:]}")
        else:
            words += [found.flag, shlex.quote(str(value))]
    return " ".join(words)


def write_json(content: Any, path: str) -> None:
    """Write a JSON file; ``-`` is the standard output that the process was started with."""
    text = msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
    if path == TO_STDOUT:
        assert sys.__stdout__
        sys.__stdout__.buffer.write(text)
        sys.__stdout__.flush()
    else:
        Path(path).write_bytes(text)


def read_json(path: str) -> Figures:
    """Read a report. Raises ConfigError: the file cannot be read, or is no report of this version."""
    try:
        content: Figures = msgspec.json.decode(Path(path).read_bytes())
        if not isinstance(content, dict) or "schema" not in content:
            raise ConfigError(f"{path} is not a report of a load test: it has no schema")
        if content["schema"] != SCHEMA:
            raise ConfigError(f"{path} has schema {content['schema']}, this version reads {SCHEMA}")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a report of a load test: {error}") from None
    return content


def write_jsonl(records: list[RequestRecord], path: str) -> None:
    """Write one line per request, with the fields of ``RequestRecord``."""
    encode = msgspec.json.Encoder().encode
    with Path(path).open("wb") as file:
        for record in records:
            file.write(encode(record) + b"\n")
