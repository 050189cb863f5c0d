"""The command line of ``cluster``, as far as it needs no Ray cluster."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray
from support.service.processes import free_port

from common.errors import ConfigError
from scripts.cluster_manager import instances
from scripts.cluster_manager import main as main_module
from scripts.cluster_manager.config import ClusterConfig, Group
from scripts.cluster_manager.main import Cluster, ClusterFailed, NoCluster, main
from scripts.cluster_manager.status import Row, Status, table

LEAST = "[gateway]\ncount = 1\n[prefill]\ncount = 1\n[decode]\ncount = 2\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(LEAST)
    return str(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scale"], "cluster: scale needs --gateway, --prefill or --decode with a number"),
        (["scale", "--decode", "-1"], "--decode must be at least 0, not -1"),
        (["up", "--config", "nowhere.toml"], "--config nowhere.toml cannot be read"),
        (["up", "--config", "CONFIG", "--autoscale"], "--autoscale needs bounds"),
        (["up", "--config", "CONFIG", "--name", "other"], "--name other contradicts name = 'baton'"),
    ],
)
def test_a_mistake_is_one_sentence_and_needs_no_ray(
    config: str, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main([config if word == "CONFIG" else word for word in words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-5", "many"])
def test_logs_begin_with_at_least_one_line(capsys: pytest.CaptureFixture[str], number: str) -> None:
    with pytest.raises(SystemExit):
        main(["logs", f"--lines={number}"])
    assert f"-n/--lines: must be a whole number above 0, not '{number}'" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "-1", "long"])
def test_a_wait_lasts_a_number_of_seconds(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    with pytest.raises(SystemExit):
        main(["down", f"--timeout={seconds}"])
    assert f"--timeout: must be a number of seconds, at least 0, not '{seconds}'" in capsys.readouterr().err


def test_without_the_extra_its_name_is_said(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["up", "--config", config]) == 2
    assert "cluster needs the extra ray; in a checkout of Baton, run" in capsys.readouterr().err


def test_the_table_has_a_row_for_each_process_and_what_is_desired() -> None:
    rows = [
        Row(role="gateway", name="gateway-0", host="10.0.0.2", state="ready", restarts=0, age_s=3_725.0, revision=1,
            url="http://10.0.0.2:8000", problem=""),
        Row(role="decode", name="decode-4", host="", state="placing", restarts=0, age_s=61.0, revision=1, url="",
            problem="no host has room for 4 CPU"),
    ]  # fmt: skip
    status = Status(name="baton", revision=1, counts={"gateway": 1, "prefill": 0, "decode": 1}, is_autoscaling=True,
                    advised={"decode": 2, "prefill": 1}, rows=rows, failures={}, is_upgrading=False,
                    host="10.0.0.3")  # fmt: skip
    assert table(status).splitlines() == [
        "ROLE     NAME       HOST      STATE    RESTARTS  SINCE",
        "gateway  gateway-0  10.0.0.2  ready    0         1 h 2 min  http://10.0.0.2:8000",
        "decode   decode-4   -         placing  0         1 min 1 s  no host has room for 4 CPU",
        "",
        "baton (supervisor on 10.0.0.3), revision 1: 1 gateway, 0 prefill, 1 decode desired; advised: 2 decode, "
        "1 prefill; autoscaling",
    ]


class Method:
    """A method of an actor; what it is called with is all that ``ray.get`` gets."""

    def __init__(self, actor: str) -> None:
        self._actor = actor

    def remote(self, *words: Any) -> str:
        return self._actor


class AwayRay:
    """Ray, whose actors are those of a test; each call may fail.

    Attributes:
        failure: what the next calls raise.
    """

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.supervisor = "first"

    def get_actor(self, name: str) -> Any:
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(events=Method(self.supervisor))

    def get(self, actor: str, timeout: float) -> str:
        if self.failure is not None:
            raise self.failure
        return actor

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: self)


def away() -> tuple[Cluster, AwayRay]:
    cluster, fake = Cluster("baton", "auto"), AwayRay()
    cluster.__dict__["_ray"] = fake
    return cluster, fake


@pytest.mark.parametrize("failure", [ConnectionError("Client is shutting down."), ray.exceptions.RaySystemError("no")])
def test_a_command_says_that_ray_does_not_answer(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "check_with_ray", lambda config: None)
    cluster, fake = away()
    assert cluster.call("events") == "first"
    fake.failure = failure
    with pytest.raises(ClusterFailed, match=r"^baton does not answer \(.*(shutting down|no).*\); try again"):
        cluster.call("events")
    with pytest.raises(ClusterFailed, match=r"^Ray does not answer \(.*(shutting down|no).*\); try again"):
        cluster.start(
            ClusterConfig(gateway=Group(count=1), prefill=Group(count=1), decode=Group(count=1)), is_autoscaling=False
        )


def test_a_cluster_that_was_started_again_is_found() -> None:
    cluster, fake = away()
    assert cluster.call("events") == "first"
    fake.failure = ray.exceptions.ActorDiedError()
    with pytest.raises(NoCluster, match="has ended"):
        cluster.call("events")
    fake.failure, fake.supervisor = None, "second"
    assert cluster.call("events") == "second"


def test_an_address_at_which_nothing_listens_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert main(["status", "--address", address]) == 2
    assert f"--address {address}: no Ray cluster answers ([Errno 111] Connection refused)" in capsys.readouterr().err


def test_an_address_from_outside_that_does_not_answer_asks_for_all_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Cluster, ray: Any) -> None:
        raise ConnectionError("ray client connection timeout")

    monkeypatch.setattr(Cluster, "_connect", fail)
    monkeypatch.setattr(main_module.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"; is it running, with grpcio, and are versions and token the same\?$"):
        Cluster("baton", "ray://head:10001").call("events")
    with pytest.raises(ConfigError, match=r"; start one with ray start$"):
        Cluster("baton", "head:6379").call("events")


class EndingCluster(Cluster):
    """A cluster whose supervisor answers so many calls, and has ended then."""

    def __init__(self, num_answers: int) -> None:
        super().__init__("baton", "auto")
        self.num_answers = num_answers

    def call(self, method: str, *words: Any, process: str = "", timeout_s: float = 30.0) -> Any:
        if self.num_answers == 0:
            raise NoCluster("there is no cluster 'baton'")
        self.num_answers -= 1
        status = Status(name="baton", revision=1, counts={}, is_autoscaling=False, advised={}, rows=[], failures={},
                        is_upgrading=False, host="10.0.0.3")  # fmt: skip
        return {"status": msgspec.json.encode(status), "events": (0, [])}.get(method)


@pytest.mark.parametrize("num_answers", range(5))
def test_down_has_succeeded_once_the_supervisor_is_no_more(num_answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_module, "POLL_S", 0.0)
    assert main_module._down(EndingCluster(num_answers), argparse.Namespace(timeout=60.0), None) == 0


class GrowingCluster(Cluster):
    """A cluster whose second process is there from the second status on; the fourth finds that it has ended."""

    def __init__(self) -> None:
        super().__init__("baton", "auto")
        self.num_asked = 0
        self.shown: list[str] = []

    def call(self, method: str, *words: Any, process: str = "", timeout_s: float = 30.0) -> Any:
        if method in ("events", "logs"):
            log = [f"{process or 'supervisor'} {number}" for number in range(3)]
            (since,) = words
            return len(log), log[since:]
        self.num_asked += 1
        if self.num_asked == 3:
            raise ClusterFailed("baton does not answer")
        if self.num_asked == 4:
            raise NoCluster("the cluster 'baton' has ended")
        rows = [
            Row(role="decode", name=f"decode-{number}", host="10.0.0.2", state="ready", restarts=0, age_s=1.0,
                revision=1, url="", problem="")
            for number in range(min(self.num_asked, 2))
        ]  # fmt: skip
        return msgspec.json.encode(
            Status(name="baton", revision=1, counts={}, is_autoscaling=False, advised={}, rows=rows, failures={},
                   is_upgrading=False, host="10.0.0.3")
        )  # fmt: skip

    def print(self, text: str) -> None:
        self.shown.append(text)


def test_logs_that_follow_show_processes_that_start_later_until_the_cluster_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main_module, "POLL_S", 0.0)
    cluster = GrowingCluster()
    with pytest.raises(NoCluster, match="has ended"):
        main_module._logs(cluster, argparse.Namespace(process=None, follow=True, lines=1), None)
    assert cluster.shown == [
        "supervisor | supervisor 2",
        "decode-0   | decode-0 2",
        "decode-1   | decode-1 0",
        "decode-1   | decode-1 1",
        "decode-1   | decode-1 2",
    ]


class SilentProcess(Cluster):
    """A cluster whose process does not answer at first, and has gone at the fourth question."""

    def __init__(self) -> None:
        super().__init__("baton", "auto")
        self.asked: list[tuple[int, float]] = []
        self.shown: list[str] = []

    def call(self, method: str, *words: Any, process: str = "", timeout_s: float = 30.0) -> Any:
        self.asked.append((words[0], timeout_s))
        if len(self.asked) < 3:
            raise main_module.NoAnswer("baton/decode-0 does not answer")
        if len(self.asked) == 4:
            raise ClusterFailed("the cluster 'baton' has no process 'decode-0'")
        return 7, ["the last line"]

    def print(self, text: str) -> None:
        self.shown.append(text)


def test_logs_that_follow_a_silent_process_go_on_and_ask_it_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_module, "POLL_S", 0.0)
    cluster = SilentProcess()
    with pytest.raises(ClusterFailed, match="has no process"):
        main_module._logs(cluster, argparse.Namespace(process="decode-0", follow=True, lines=1), None)
    assert cluster.asked == [(since, main_module.FOLLOW_S) for since in (-1, -1, -1, 7)]
    assert cluster.shown == ["the last line"]


def test_logs_of_a_silent_process_that_are_not_followed_end_after_the_whole_wait() -> None:
    cluster = SilentProcess()
    with pytest.raises(ClusterFailed, match="does not answer"):
        main_module._logs(cluster, argparse.Namespace(process="decode-0", follow=False, lines=1), None)
    assert cluster.asked == [(-1, main_module.CALL_S)]


def test_an_actor_that_is_late_is_told_from_one_that_has_failed() -> None:
    cluster, fake = away()
    fake.failure = ray.exceptions.GetTimeoutError("late")
    with pytest.raises(main_module.NoAnswer, match=r"^baton does not answer \(late\)"):
        cluster.call("events")
