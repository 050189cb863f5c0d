"""Ranks as real processes: they compute with rank 0, are missed when they end, and end with it."""

import os
import queue
import signal
from pathlib import Path

import pytest
from support.engine.engine_driver import Driver
from support.engine.reference_models import draw_prompts, make_model

from common.engine.executor import TorchExecutor, load_executor
from common.engine.models.config import ModelConfig
from common.engine.tensor_parallel.group import RankLostError
from common.errors import ConfigError
from common.node.tensor_parallel.channel import Load
from common.node.tensor_parallel.rank_processes import RankProcesses


def load_of(folder: Path, num_ranks: int) -> Load:
    return Load(
        rank=0,
        num_ranks=num_ranks,
        name="node",
        folder=str(folder),
        device="cpu",
        dtype="float32",
        attention="cpu",
        page_size=16,
        num_threads=1,
        log_level="warning",
        log_format="console",
    )


def executor_of(folder: Path, ranks: RankProcesses) -> TorchExecutor:
    def num_pages() -> int:
        ranks.wait_until_loaded()
        return 20

    return load_executor(
        ModelConfig.load(str(folder)),
        dtype="float32",
        num_slots=2,
        num_pages=num_pages,
        page_size=16,
        attention="cpu",
        ranks=ranks,
    )


def test_a_rank_that_is_killed_ends_the_computation_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    [(prompt, expected)] = draw_prompts(folder, [40], 3)
    lost: queue.Queue[Exception] = queue.Queue()
    with RankProcesses(2) as ranks:
        ranks.start(load_of(folder, 2))
        executor = executor_of(folder, ranks)
        ranks.watch(lost.put)
        driver = Driver(executor)
        text = driver.start(0, prompt)
        driver.finish([text], 3, chunk=16)
        assert tuple(text.output) == expected
        [pid] = ranks.pids
        os.kill(pid, signal.SIGKILL)
        error = lost.get(timeout=120)
        assert isinstance(error, RankLostError)
        assert "rank 1 of this node has ended with status -9" in str(error)
        with pytest.raises(RankLostError):
            driver.finish([driver.start(1, prompt)], 1)
        executor.close()
    assert lost.empty()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_computation(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    with RankProcesses(2, timeout_s=15) as ranks:
        ranks.start(load_of(folder, 2))
        executor = executor_of(folder, ranks)
        [pid] = ranks.pids
        os.kill(pid, signal.SIGSTOP)
        driver = Driver(executor)
        with pytest.raises(RankLostError):
            driver.finish([driver.start(0, [1, 2, 3])], 1)
        executor.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_rank_that_cannot_load_the_model_refuses_the_start(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    with RankProcesses(2) as ranks:
        ranks.start(load_of(tmp_path / "missing", 2))
        with pytest.raises(ConfigError, match=r"rank 1 of this node cannot load the model: .*missing"):
            executor_of(folder, ranks)
        [pid] = ranks.pids
    assert not Path(f"/proc/{pid}").exists()


def test_one_rank_starts_no_process() -> None:
    with RankProcesses(1) as ranks:
        assert ranks.pids == []
