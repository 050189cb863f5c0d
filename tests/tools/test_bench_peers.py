"""``bench engine``: the engines that ``--peer`` names, or what is missing, and the experts that a step reads."""

import argparse
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.engine.models import feed_forward
from common.engine.models.expert_config import QWEN_EXPERTS, ExpertConfig
from common.errors import ConfigError
from scripts.benchmarks.engines import engine
from scripts.benchmarks.engines.engine import experts_read, run, thread_counts
from scripts.benchmarks.engines.overlap import Overlap, StepTimes
from scripts.benchmarks.harness.service_fixture import ServiceStartError, running_process
from scripts.benchmarks.main import empty_figures
from scripts.benchmarks.peers.llama_cpp import LlamaCppPeer, parse_output
from scripts.benchmarks.peers.peer import Workload, parse_peers
from scripts.benchmarks.peers.vllm_peer import VllmPeer, environment, serving_environment
from scripts.benchmarks.peers.vllm_server import running_vllm

WORKLOAD = Workload(num_layers=1, num_threads=1, context=16, num_steps=2, max_prompt=16, max_batch=1)


def test_a_peer_is_a_name_and_a_path_that_exists(tmp_path: Path) -> None:
    assert parse_peers([f"vllm={sys.executable}", f"llama.cpp={tmp_path}"]) == {
        "vllm": Path(sys.executable),
        "llama.cpp": tmp_path,
    }


@pytest.mark.parametrize("word", ["sglang=/tmp", "vllm", "vllm=/no/such/python"])
def test_another_name_or_path_is_refused_with_what_to_give(word: str) -> None:
    with pytest.raises(ConfigError, match=f"^--peer {word}: .*give .*a python with vLLM"):
        parse_peers([word])


def test_a_python_without_vllm_is_refused_with_its_own_words() -> None:
    with pytest.raises(ConfigError, match=r"^--peer vllm: (?s:.*)No module named 'vllm'"):
        VllmPeer(Path(sys.executable), WORKLOAD)


def test_vllm_gets_the_threads_of_the_table_and_none_of_our_packages(tmp_path: Path) -> None:
    found = environment(
        tmp_path / "bin/python", WORKLOAD, {"PYTHONPATH": "/ours", "OMP_NUM_THREADS": "7", "HOME": "/root"}
    )
    assert "PYTHONPATH" not in found
    assert "LD_PRELOAD" not in found
    assert found["HOME"] == "/root"
    assert found["OMP_NUM_THREADS"] == "1"
    assert "," not in found["VLLM_CPU_OMP_THREADS_BIND"]
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_vllm_has_room_for_the_last_block_of_every_row(tmp_path: Path) -> None:
    # 28 layers, 112 KiB a token: 32 rows of 273 tokens in 3 blocks of 128, and 512 of a prompt are 12,800 tokens,
    # 1.37 GiB. Counted in tokens they would be 9,248, less than a GiB.
    workload = Workload(num_layers=28, num_threads=1, context=256, num_steps=16, max_prompt=512, max_batch=32)
    assert environment(tmp_path / "bin/python", workload, {})["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_the_server_of_vllm_computes_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = serving_environment(tmp_path / "bin/python", 1, 1 << 30, {"VIRTUAL_ENV": "/ours"})
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert not {"VLLM_ENABLE_V1_MULTIPROCESSING", "VIRTUAL_ENV"} & set(found)


def test_a_server_that_ends_is_reported_with_its_own_words() -> None:
    starts = running_vllm(Path(sys.executable), "/no/model", num_threads=1, max_model_len=64, kv_bytes=1)
    with pytest.raises(ServiceStartError, match=r"^--peer vllm=(?s:.*)No module named 'vllm'"), starts:
        pass


def test_a_folder_without_the_program_of_llama_cpp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*llama-batched-bench; build llama-batched-bench there"):
        LlamaCppPeer(tmp_path, WORKLOAD)


def test_vllm_is_measured_with_the_dense_shape_only(tmp_path: Path) -> None:
    options = argparse.Namespace(peer=[f"vllm={tmp_path}"], shape="qwen3-moe-small", threads="1")
    with pytest.raises(ConfigError, match=r"--peer vllm: it is measured with --shape qwen3-0\.6b only"):
        run(options)


def test_a_device_that_never_waits_for_the_host_has_no_figure_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU, which has its next step before one ends. A figure of zero would say that nothing was measured."""
    limits = SimpleNamespace(read_bytes_per_s=1e9, flops_per_s=1e9)
    overlap = Overlap(8, StepTimes(step_s=0.01, idle_s=0.002), StepTimes(step_s=0.01, idle_s=0.0))
    monkeypatch.setattr(engine, "measure", lambda *_: (limits, [], [overlap]))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    found = engine.run(argparse.Namespace(peer=[], shape="qwen3-0.6b", threads="1", new_tokens=16))
    assert found and not empty_figures(found)


def test_the_figures_of_llama_cpp_are_read_from_its_json() -> None:
    line = (
        '{"n_kv_max": 2048, "flash_attn": -1, "pp": 256, "tg": 16, "pl": 1, "t_pp": 0.25, "t_tg": 3.5, "speed": 74.5}'
    )
    short = line.replace("3.5", "0.1")  # measured afterwards, so that the first line is certainly written
    found = parse_output(f"load_backend: loaded\n\n{line}\n{short}\n\n")
    assert (found["t_pp"], found["t_tg"]) == (0.25, 3.5)
    with pytest.raises(ConfigError, match="printed no figures: out of memory"):
        parse_output("out of memory\n")


@pytest.mark.parametrize("text", ["0", "1,x", "1,,2"])
def test_threads_are_counts(text: str) -> None:
    assert thread_counts("1,2") == [1, 2]
    with pytest.raises(ConfigError, match=f"--threads {text}: give numbers of threads, such as 1,2"):
        thread_counts(text)


def test_experts_are_counted_although_graphs_compute_the_steps() -> None:
    class Executor:
        """Its graphs replay kernels, and call no function."""

        _graphs: object | None = object()

        def run(self) -> None:
            if self._graphs is None:
                scores = torch.tensor([[0.0, 3.0, 2.0, 1.0], [9.0, 3.0, 2.0, 1.0]])
                feed_forward.route(scores, ExpertConfig(4, 2, 8, True, (0,), QWEN_EXPERTS))

    executor: Any = Executor()
    assert experts_read(executor, executor.run) == 3  # 1 and 2, and 0 and 1
    assert executor._graphs is not None


def test_processes_that_a_stopped_server_leaves_behind_are_ended() -> None:
    server = "import subprocess, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-c", server]
        with running_process(command, os.environ, output=subprocess.PIPE, log=log) as process:
            assert process.stdout
            child = os.pidfd_open(int(process.stdout.readline()))
    with os.fdopen(child, "rb"):
        assert select.select([child], [], [], 30.0)[0], "the child still runs"
    assert process.returncode == -signal.SIGTERM
