"""Ranks as real processes: they compute with rank 0, are missed when they end, and end with it."""

import errno
import os
import queue
import select
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from support.engine.engine_driver import Driver
from support.engine.lora_adapters import make_adapter, merge
from support.engine.reference_models import draw_prompts, make_model

from common.cache.page_layout import PageLayout
from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig
from common.engine.tensor_parallel.group import RankGroup, open_group
from common.errors import ConfigError, RankLostError
from common.node.loading.model_loading import check_ranks
from common.node.tensor_parallel.channel import LoadModel
from common.node.tensor_parallel.rank_processes import RankProcesses

#: The main module of ranks other than 0.
RANK = "scripts.serving.rank"


def load_of(model: Path, num_ranks: int, **options: Any) -> LoadModel:
    load = LoadModel(
        rank=0,
        num_ranks=num_ranks,
        name="node",
        folder=str(model),
        digest=ModelConfig.load(str(model)).digest,
        device="cpu",
        dtype="float32",
        weight_dtype="auto",
        attention="cpu",
        num_threads=1,
        log_level="warning",
        log_format="console",
        has_dummy_weights=False,
        implementation="native",
        overrides={},
        trust_remote_code=False,
    )
    return msgspec.structs.replace(load, **options)


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
    with RankProcesses(2, RANK) as ranks:
        ranks.start(load_of(folder, 2))
        executor = executor_of(folder, ranks)
        ranks.watch(lost.put)
        driver = Driver(executor)
        text = driver.start(0, prompt)
        assert driver.finish([text], 3, chunk=16) == [expected]
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
    with RankProcesses(2, RANK) as ranks:
        ranks.start(load_of(folder, 2))
        executor = executor_of(folder, ranks)
        [pid] = ranks.pids
        os.kill(pid, signal.SIGSTOP)
        driver = Driver(executor)
        with pytest.raises(RankLostError):
            driver.finish([driver.start(0, [1, 2, 3])], 1)
        executor.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow(sample=0.33)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"folder": "/missing"}, ".*/missing"),
        ({"digest": "0"}, ".* has changed since this node was started; start it again"),
        ({"dtype": "float31"}, "KeyError: 'float31'"),  # stands for any error of code that is not Baton's
    ],
)
def test_a_rank_that_cannot_load_the_model_refuses_the_start(
    tmp_path: Path, options: dict[str, str], reason: str
) -> None:
    folder = make_model(tmp_path)
    with RankProcesses(2, RANK) as ranks:
        ranks.start(load_of(folder, 2, **options))
        with pytest.raises(ConfigError, match=rf"rank 1 of this node cannot load the model: {reason}"):
            executor_of(folder, ranks)
        [pid] = ranks.pids
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_group_finds_its_store_again_after_it_has_formed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL at its first operation, and with every backend when it ends."""
    stores: list[Any] = []

    def noting(store: Any, *args: Any, **options: Any) -> RankGroup:
        stores.append(store)
        return open_group(store, *args, **options)

    monkeypatch.setattr("common.engine.tensor_parallel.group.open_group", noting)
    folder = make_model(tmp_path)
    with RankProcesses(2, RANK) as ranks:
        ranks.start(load_of(folder, 2))
        executor = executor_of(folder, ranks)
        [store] = stores
        store.set_timeout(timedelta(seconds=60))
        store.set("id", "late")
        assert store.get("id") == b"late"
        executor.close()


@pytest.mark.slow
def test_ranks_read_adapters_while_steps_go_on_and_name_the_one_that_cannot(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "loras" / "a", folder)
    [(prompt, plain)] = draw_prompts(folder, [40], 3)
    [(other, expected)] = draw_prompts(merge(tmp_path / "merged", folder, adapter), [40], 3)
    with RankProcesses(2, RANK) as ranks:
        ranks.start(load_of(folder, 2))
        executor = executor_of(folder, ranks)
        with pytest.raises(ConfigError, match=r"rank 1 of this node: .*: has changed while it was loaded"):
            ranks.read_adapter(7, "another digest", adapter, max_rank=8, root=None)
        executor.adapters["a"] = executor.read_adapter(adapter, max_rank=8, root=tmp_path / "loras")
        assert executor.adapters["a"].number > 0
        driver = Driver(executor)
        texts = [driver.start(0, prompt), driver.start(1, other, adapter="a")]
        assert driver.finish(texts, 3, chunk=16) == [plain, expected]
        executor.drop_adapter("a")
        text = driver.start(0, prompt)
        assert driver.finish([text], 3) == [plain]
        executor.close()


def open_for_reader(pipe: Path) -> int:
    """Wait until a process reads the pipe, and open it for writing."""
    ends = time.monotonic() + 120
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > ends:
                raise
            time.sleep(0.02)


def test_a_rank_that_loads_the_model_ends_with_its_node(tmp_path: Path) -> None:
    """The rank waits for a file of the model, a pipe, when the process that has started it is killed."""
    folder = make_model(tmp_path)
    load = msgspec.json.encode(load_of(folder, 2)).decode()
    pipe = folder / "generation_config.json"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    code = f"""if True:
        import msgspec, sys
        from common.node.tensor_parallel.channel import LoadModel
        from common.node.tensor_parallel.rank_processes import RankProcesses
        ranks = RankProcesses(2, {RANK!r})
        ranks.start(msgspec.json.decode({load!r}, type=LoadModel))
        print(*ranks.pids, flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        rank = os.pidfd_open(int(node.stdout.readline()))
        try:
            writer = open_for_reader(pipe)
            node.kill()
            assert select.select([rank], [], [], 120)[0], "the rank is left of a node"
            os.close(writer)
        finally:
            node.kill()
            os.close(rank)


def test_one_rank_starts_no_process() -> None:
    with RankProcesses(1, RANK) as ranks:
        assert ranks.pids == []


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="the machine has the devices")
def test_a_node_with_too_few_devices_for_its_ranks_is_refused(tmp_path: Path) -> None:
    config = ModelConfig.load(str(make_model(tmp_path)))
    with pytest.raises(ConfigError, match=r"--tp 2: --device cuda:1: torch finds (no|only 1) CUDA device"):
        check_ranks(config, 2, "cuda:0")


def test_a_rank_without_memory_for_its_pool_refuses_the_start_with_the_reason(tmp_path: Path) -> None:
    layout = PageLayout(num_layers=1, page_size=16, num_kv_heads=1, head_dim=16, dtype="float32")
    pool: Any = SimpleNamespace(
        model_layout=layout, num_full_pages=(1 << 62) // layout.page_bytes, groups=None, num_window_pages=0
    )
    with RankProcesses(2, RANK) as ranks:
        ranks.start(load_of(make_model(tmp_path), 2))
        ranks.wait_until_loaded()
        with pytest.raises(ConfigError, match=r"rank 1 of this node cannot make its pool: .*Cannot allocate memory"):
            ranks.join(pool)


def test_a_rank_that_is_killed_while_it_loads_the_model_is_named(tmp_path: Path) -> None:
    with RankProcesses(2, RANK) as ranks:
        ranks.start(load_of(make_model(tmp_path), 2))
        os.kill(*ranks.pids, signal.SIGKILL)
        with pytest.raises(ConfigError, match="rank 1 of this node ended when it was to load the model"):
            ranks.wait_until_loaded()
