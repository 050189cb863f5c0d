"""Makes a report of records without a server."""

from typing import Any

import numpy as np

from scripts.load_tester.analysis import metrics
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.report import Report, config_figures


def report_of(records: list[RequestRecord], **options: Any) -> Report:
    """The report of a valid run with these records, over 50 seconds."""
    config = LoadtestConfig(**options)
    rng = np.random.default_rng(0)
    tenants = metrics.groups(records, "tenant", config.slos, {}, rng)
    rate = len(records) / 50 or None
    return Report(
        config=config_figures(config),
        server={"model": "m", "kind": "mock"},
        started_at="2026-11-22T22:00:00+00:00",
        notes=[],
        length_s=50.0,
        reasons=[],
        arrivals={
            "count": len(records), "achieved_rate": rate, "intended_rate": rate, "cv": None, "cv_expected": None,
            "ks_p": None, "lateness": {"p50": 0.0, "p99": 0.0, "max": 0.0},
        },
        client={
            "processes": 1, "busiest": 0.01, "cpu_ms_per_event": None, "lag_p50_s": 0.0, "lag_p99_s": 0.0,
        },
        latency=metrics.latencies(records, rng),
        throughput=metrics.throughput(records, 0.0, 50.0),
        service=metrics.service(records, config.slos, {})
        | {"goodput_per_s": metrics.goodput(records, config.slos, {}, 0.0, 50.0)},
        errors=metrics.errors(records),
        classes=metrics.groups(records, "class_name", config.slos, {}, rng),
        tenants=tenants,
        fairness=metrics.fairness(tenants, records, records, 0.0, 50.0),
        caching=metrics.caching(records),
        tokens=metrics.tokens(records),
        stages=metrics.stages(records, rng),
        outputs={},
        scrape={},
        num_requests=len(records),
        num_measured=len(records),
        start_up_s=0.5,
        rate=rate,
        records=records,
    )  # fmt: skip
