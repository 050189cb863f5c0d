"""``bench handoff`` without its runs: the cost of a request, and the table."""

import argparse
from types import SimpleNamespace

import pytest
from support.load.records import record

from common.errors import ConfigError
from scripts.benchmarks.services import handoff
from scripts.benchmarks.services.handoff import LOCAL, Options, Sample, add_options, flags, run, sample_of, table
from scripts.load_tester.config import LoadtestConfig


def parse(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(words)


def sample(arrangement: str, *, ttft: float, first_gap: float, step: float, **stages: float) -> Sample:
    return Sample(arrangement, 512, ttft, first_gap, step, stages)


def test_the_cost_of_a_request_is_its_first_gap_minus_a_step() -> None:
    found = sample_of("shm", 512, record(1.0, 1.75, 2.0, 2.25, 2.625, timings={"transfer_s": 0.25}))
    assert found is not None
    assert (found.first_gap_s, found.step_s, found.cost_s) == (0.75, 0.25, 0.5)
    assert found.stages == {"transfer_s": 0.25}


@pytest.mark.parametrize("stamps", [(1.0,), (1.0, 1.5, 2.0)])
def test_requests_with_merged_or_too_few_tokens_are_not_used(stamps: tuple[float, ...]) -> None:
    assert sample_of("shm", 512, record(*stamps)) is None


def test_the_table_shows_the_cost_as_a_share_of_local_ttft() -> None:
    options = parse("--transports=shm,tcp", "--lengths=512")
    samples = [sample(LOCAL, ttft=1.0, first_gap=0.1, step=0.1)]
    samples += [sample("shm", ttft=1.2, first_gap=0.1 + cost, step=0.1, transfer_s=0.02) for cost in (0.0, 0.03, 0.5)]
    samples += [sample("tcp", ttft=1.2, first_gap=0.16, step=0.1)]
    _, local, shm, tcp = table(samples, options)
    assert local.split()[-4:] == ["1000.00", "100.00", "100.00", "0.00"]
    assert shm.split()[3:] == ["1200.00", "130.00", "100.00", "30.00", "500.00", "20.00", "nan", "3.0%"]
    assert tcp.endswith("6.0%  above the mark of 5%")


def test_prompts_of_different_lengths_have_different_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a longer one would find the shorter one before it in the cache."""
    salts: list[int] = []

    def measured(config: LoadtestConfig, *, salt: int = 0) -> tuple[SimpleNamespace, float]:
        salts.append(salt)
        return SimpleNamespace(records=[]), 0.0

    monkeypatch.setattr(handoff, "measured_load", measured)
    for length in (256, 512):
        handoff.ask("http://127.0.0.1:1", LOCAL, length, parse(), 0)
    assert len(set(salts)) == 2


def test_every_node_has_one_thread() -> None:
    assert all("--threads=1" in flags(name, "m", "float32") for name in (LOCAL, "shm", "tcp"))
    assert "--prefill=0" in flags(LOCAL, "m", "float32")
    assert "--transport=tcp" in flags("tcp", "m", "float32")


def test_too_few_tokens_for_a_step_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--new-tokens must be at least 4"):
        run(parse("--new-tokens=3"))
