"""A recording holds what a node did; a replay in another process makes the same plans, byte for byte."""

import asyncio
import os
import re
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.cluster.fake_engine import VOCAB_SIZE, FakeExecutor
from support.cluster.manual_clock import ManualClock
from support.service.client import Client, prompt_of
from support.service.processes import ROOT
from support.service.service import Service, running

from common.cache.page_allocator import PageAllocator
from common.config.node import NodeConfig
from common.config.shared import SCHEDULING_VARIABLES
from common.errors import ConfigError, ErrorCode
from common.node.loading.memory_plan import Capacity
from common.node.recording import format as frames
from common.node.recording.recorder import (
    RecordedRole,
    RecordedTransport,
    RecordedTransports,
    Recorder,
    config_from,
    plain_config,
)
from common.node.recording.start import start_recording
from common.node.worker_context import WorkerContext, make_cache
from common.sampling_params import SamplingParams
from common.scheduling.in_batch_prefix_caching import prefix_limits_from_environ
from common.step_plan import PageDelta, Row, StepPlan
from common.wire.messages import Abort, Generate, LayoutMessage, Peer
from decode_node.factory import build as build_decode
from kv_transfer.transports.negotiation import NegotiatingReader
from scripts.simulator.main import main
from scripts.simulator.replay import replay
from scripts.simulator.service.inprocess_transport import InProcessReader, Wire

HEADER = frames.RecordingHeader(
    version=frames.VERSION,
    role="decode",
    config=plain_config(NodeConfig(role="decode")),
    environ={},
    capacity=Capacity(4, 16, 8, None),
    layout=LayoutMessage(1, 1, 1, 16, "float32"),
    digest="d",
    incarnation="i" * 16,
    vocab_size=100,
    eos_token_ids=(0,),
    transport="shm",
    transports=("shm",),
)


def written(path: Path, *parts: frames.Frame) -> str:
    with path.open("wb") as file:
        for part in parts:
            frames.write_frame(file, part)
    return str(path)


def test_a_recording_holds_every_variable_that_a_role_reads() -> None:
    class Environ(dict[str, str]):
        """Notes what is looked up."""

        def __init__(self) -> None:
            super().__init__()
            self.asked: set[str] = set()

        def get(self, name: str, default: object = None) -> object:  # type: ignore[override]
            self.asked.add(name)
            return default

    environ = Environ()
    prefix_limits_from_environ(environ)
    assert environ.asked == set(SCHEDULING_VARIABLES)


def test_frames_are_read_as_they_were_written(tmp_path: Path) -> None:
    plan = StepPlan(3, (), (PageDelta(1, 0, (5,)),), (Row(1, 16, None, True), Row(2, 0, (7, 8), False)))
    told = [HEADER, frames.Planned(1.25, plan), frames.Planned(1.5, None), frames.GatewayMessage(2.0, Abort("r", 0))]
    told += [frames.GrammarCompiled(2.5, "start: /a/"), frames.GrammarFailed(2.5, "start: /(/", "unclosed group")]
    told += [frames.Stopped(3.0, "the node failed", ErrorCode.INTERNAL)]
    assert list(frames.read_frames(written(tmp_path / "f", *told))) == told


def test_a_truncated_frame_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "f"
    written(path, HEADER, frames.Ticked(1.0), frames.Ticked(2.0))
    whole = path.read_bytes()
    for size in range(len(whole) - 20, len(whole)):
        path.write_bytes(whole[:size])
        assert list(frames.read_frames(str(path)))[:1] == [HEADER]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"\xff\xff\xff\xff....", "4294967295 bytes exceed the limit of a frame"),
        (b"\x03\x00\x00\x00abc", "frame 0"),
        (b"\x07\x00\x00\x00\x92\xa4tick\x01", "does not begin with a header"),
    ],
)
def test_a_file_that_is_not_a_recording_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(frames.RecordingError, match=sentence):
        list(frames.read_frames(str(path)))
    assert main(["--replay", str(path)]) == 2


def test_a_recording_of_another_version_is_refused(tmp_path: Path) -> None:
    import msgspec

    path = written(tmp_path / "f", msgspec.structs.replace(HEADER, version=frames.VERSION + 1))
    with pytest.raises(frames.RecordingError, match="has version"):
        list(frames.read_frames(path))


def test_a_recording_with_a_policy_that_cannot_be_found_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import msgspec

    config = plain_config(NodeConfig(role="decode", schedule_policy="nowhere:Own"))
    path = written(tmp_path / "f", msgspec.structs.replace(HEADER, config=config))
    assert main(["--replay", path]) == 2
    assert capsys.readouterr().err == (
        "simulate: --schedule-policy nowhere:Own cannot be imported: No module named 'nowhere'; its folder must be in "
        "PYTHONPATH\n"
    )


def test_a_recorded_configuration_lacks_only_secrets() -> None:
    config = NodeConfig(role="decode", priority_classes=("high:8", "low:1"), page_size=4)
    assert config_from(plain_config(config)) == config
    assert "s3cret" not in str(plain_config(NodeConfig(role="decode", cluster_key="s3cret")))


def test_a_recording_of_a_node_with_keys_can_be_replayed_without_them() -> None:
    far = {"advertise_host": "10.0.0.1", "gateway": "10.0.0.2:8001"}
    config = NodeConfig(role="decode", keys="/etc/baton/keys", cluster_key="s3cret", **far)
    again = config_from(plain_config(config))
    assert (again.advertise_host, again.gateway, again.keys) == ("10.0.0.1", "10.0.0.2:8001", None)


def test_recording_with_page_checksums_is_refused() -> None:
    with pytest.raises(ConfigError, match="--record and --kv-checksum exclude each other"):
        NodeConfig(role="decode", record="x", kv_checksum="all")


def test_a_recording_is_private_and_overwrites_no_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    recorder = Recorder(str(tmp_path / "f"))
    recorder.note(HEADER)
    recorder.close()
    assert recorder.path == str(tmp_path / "f.1")
    assert (tmp_path / "f").read_text() == "mine"
    assert stat.S_IMODE((tmp_path / "f.1").stat().st_mode) == 0o600
    assert list(frames.read_frames(recorder.path)) == [HEADER]


def test_a_recording_is_not_written_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        Recorder(str(tmp_path))
    assert not Path(f"{tmp_path}.1").exists()


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frames, "open_new", lambda path: (open("/dev/full", "wb", buffering=0), path))  # noqa: SIM115
    recorder = Recorder(str(tmp_path / "f"))
    for _ in range(5):
        recorder.note(HEADER)
    recorder.close()
    assert caplog.text.count(f"recording into {tmp_path / 'f'} ends here: [Errno 28]") == 1
    recorder.note(HEADER)


def test_a_frame_that_cannot_be_written_ends_the_recording_with_a_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(frames, "write_frame", fail)
    recorder = Recorder(str(tmp_path / "f"))
    recorder.note(HEADER)
    recorder.close()
    assert caplog.text.count("ends here") == 1
    assert "unforeseen" in caplog.text


def test_only_unusual_results_of_a_transport_are_recorded(tmp_path: Path) -> None:
    class Transport:
        name = "t"

        def __init__(self) -> None:
            self.news: list[list[int]] = [[], [], [7]]

        def done(self) -> list[int]:
            return self.news.pop(0)

        def write(self, peer: str, pages: list[tuple[int, int]]) -> int:
            return 41

        def files(self) -> tuple[int, ...]:
            return (3,)

    recorder = Recorder(str(tmp_path / "f"))
    recorder.note(HEADER)
    transport = RecordedTransport(Transport(), "writer", recorder)
    assert [transport.done(), transport.done(), transport.done()] == [[], [], [7]]
    assert (transport.write("p", []), transport.files(), transport.name) == (41, (3,), "t")
    recorder.close()
    _, done, write = frames.read_frames(recorder.path)
    assert isinstance(done, frames.TransportResult) and (done.method, done.call, bytes(done.result)) == (
        "done",
        2,
        b"\x91\x07",
    )
    assert isinstance(write, frames.TransportResult) and (write.method, write.call) == ("write", 0)


def test_a_run_with_two_outstanding_plans_replays_identically(tmp_path: Path) -> None:
    """The order of plans and commits is part of the recording; requests come, are retracted and leave in between."""
    config = NodeConfig(role="decode", page_size=4, record=str(tmp_path / "f"), num_reserved_decode_tokens=0)
    capacity = Capacity(num_slots=4, num_pages=14, max_queued=99, chunk_tokens=8)
    executor = FakeExecutor(capacity.num_pages, config.page_size, capacity.num_slots)
    allocator = PageAllocator(capacity.num_pages)
    parts = WorkerContext(
        config=config,
        capacity=capacity,
        pool=executor.pool,
        layout=executor.pool.layout,
        allocator=allocator,
        cache=make_cache(config, allocator),
        clock=ManualClock(),
        digest="d",
        incarnation="i" * 16,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
    )
    reader = NegotiatingReader([InProcessReader(Wire(), executor.pool)])
    ends = SimpleNamespace(reader=reader)
    recorder = start_recording(parts, ends)
    role = RecordedRole(build_decode(parts, RecordedTransports(ends, recorder)), recorder)
    plans: list[StepPlan] = []
    for turn in range(80):
        now = float(turn)
        if turn % 4 == 0:
            prompt = tuple(range(turn, turn + 9))
            sampling = SamplingParams(max_new_tokens=12, temperature=0.0)
            role.on_gateway(
                Generate(f"r{turn}", 0, prompt, sampling, None, Peer("d", "d" * 16, "here:1"), timeout_s=99.0), now
            )
        if turn % 20 == 13:
            role.on_gateway(Abort(f"r{turn - 1}", 0), now)
        plan = role.plan(now)
        plans += [] if plan is None else [plan]
        if len(plans) == 2 or (plans and plan is None):
            role.commit(executor.run(plans.pop(0)), now)
        role.tick(now)
        role.check()
        role.outbox.gateway.clear()
    assert role.counters()["retractions"] > 0
    recorder.close()
    told = [
        frame for frame in frames.read_frames(recorder.path) if isinstance(frame, frames.Planned | frames.Committed)
    ]
    planned = [isinstance(frame, frames.Planned) and frame.plan is not None for frame in told]
    assert any(map(all, pairwise(planned))), "no two plans were outstanding at once"
    found = replay(recorder.path)
    assert found.difference == ()
    assert found.num_plans > 30


# ---- live -----------------------------------------------------------------------------------------------------------


def replayed(path: Path) -> "subprocess.CompletedProcess[str]":
    """By the command, in a process whose sets have another order."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345"}
    words = [sys.executable, "-m", "scripts.cli", "simulate", "--replay", str(path)]
    return subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)


NUM_LEAVING = 4


async def _num_left(client: Client) -> int:
    """How many clients have left before the end of their answers, as the gateway counts them."""
    async with client.session.get("/metrics") as answer:
        found = re.search(r"^baton_disconnects_total{.*} (\d+)", await answer.text(), re.MULTILINE)
    return int(found.group(1)) if found else 0


async def _load(service: Service) -> dict[str, dict[str, float]]:
    """Prompts with shared beginnings, long answers in a small pool, and clients that leave."""
    async with service.client() as client:
        head = prompt_of(40, 1)
        exchanges = [
            client.begin([*head[: number % 3 * 20], *prompt_of(30, number)], 120, ignore_eos=False)
            for number in range(16)
        ]
        await exchanges[0].has(5)
        await asyncio.gather(*(exchange.leave() for exchange in exchanges[3:6]))
        await exchanges[1].has(40)
        await exchanges[8].leave()
        while await _num_left(client) < NUM_LEAVING:  # the answers of some had ended before they left
            further = client.begin(prompt_of(30, 99), 400)
            await further.has(5)
            await further.leave()
        for number in (0, 1, 2, 7, 9, 10, 11, 12, 13, 14, 15):
            await exchanges[number].end(60)
        return await client.counters()


@pytest.mark.slow
def test_a_live_run_with_aborts_and_retractions_replays_identically(tmp_path: Path) -> None:
    only = {name: {"record": tmp_path / name} for name in ("prefill-0", "decode-0")}
    only["decode-0"] |= {"max_total_tokens": 640, "page_size": 16, "num_reserved_decode_tokens": 0}
    with running(tmp_path / "logs", only=only) as service:
        counters = asyncio.run(_load(service))
        for name in ("prefill-0", "decode-0"):
            service.stop(name)
    assert counters["decode-0"]["retractions"] > 0
    for name in ("prefill-0", "decode-0"):
        found = replayed(tmp_path / name)
        assert found.returncode == 0, found.stdout + found.stderr
        assert found.stdout.startswith("identical: ")
        told = list(frames.read_frames(str(tmp_path / name)))
        assert sum(isinstance(f, frames.GatewayMessage) and isinstance(f.message, Abort) for f in told) >= NUM_LEAVING
    _spoil_and_replay(tmp_path / "decode-0")


def _spoil_and_replay(path: Path) -> None:
    """A recording in which one row of one plan is another is told apart, by its place."""
    told = list(frames.read_frames(str(path)))
    planned = [i for i, f in enumerate(told) if isinstance(f, frames.Planned) and f.plan is not None]
    number = planned[len(planned) // 2]
    frame = told[number]
    assert isinstance(frame, frames.Planned) and frame.plan is not None
    untold = [f for f in told if not (isinstance(f, frames.TransportResult) and f.method == "offer")]
    (line,) = replay(written(path.with_suffix(".short"), *untold)).difference
    assert line.endswith("0. call of the transport's offer is not in the recording")
    first, *rest = frame.plan.rows
    rows = (first._replace(start=first.start + 1), *rest)
    plan = StepPlan(frame.plan.step, frame.plan.admits, frame.plan.pages, rows)
    told[number] = frames.Planned(frame.now, plan)
    found = replayed(Path(written(path.with_suffix(".spoilt"), *told)))
    assert found.returncode == 1
    assert f"step {plan.step}, rows[0]: recorded" in found.stdout
