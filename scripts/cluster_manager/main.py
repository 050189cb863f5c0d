"""``cluster``: gateways and nodes on the hosts of a Ray cluster, kept running and ready by a supervisor there."""

import argparse
import contextlib
import functools
import importlib.util
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from common.errors import BatonError, ConfigError, needs_extra
from common.wire.address import host_and_port
from scripts.cluster_manager.config import ROLES, ClusterConfig, read_cluster_file
from scripts.cluster_manager.status import Status, is_settled, table

HELP = """Run gateways and nodes on the hosts of a Ray cluster.

  cluster up --config cluster.toml      place and start everything, and wait until it serves
  cluster scale --decode 12             change counts; --autoscale follows the gateways' advice
  cluster upgrade --config cluster.toml replace all processes, one after the other, by drain
  cluster status                        the processes: where they are, and how they are
  cluster logs [NAME] [-f]              lines of one process, of the supervisor, or of all
  cluster down                          drain and stop everything

Run these on a host of the Ray cluster or, with --address ray://HEAD:10001, on any other. Baton must be installed,
with the extra ray, in the environment of ray start on every host. Secrets (BATON_API_KEY, BATON_CLUSTER_KEY) are
those of that environment."""
#: How long a command waits for an actor. While logs are followed, a silent one holds up neither others nor the end.
CALL_S, FOLLOW_S = 30.0, 2.0
POLL_S = 1.0
#: How long a command waits for the port of Ray's head.
CONNECT_S = 10.0
CLIENT = "ray://"
#: Ray's server of clients starts a process for each by forking beside gRPC's threads, which now and then fails.
CLIENT_TRIES = 3
SUPERVISOR = "supervisor"


class ClusterFailed(BatonError):
    """The cluster does not do what a command asks for."""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        config = read_cluster_file(options.config) if getattr(options, "config", None) else None
        name = options.name or (config.name if config else "baton")
        if config is not None and name != config.name:
            raise ConfigError(f"--name {name} contradicts name = {config.name!r} in {options.config}; give one of them")
        cluster = Cluster(name, options.address)
        command: Callable[[Cluster, argparse.Namespace, ClusterConfig | None], int] = options.run
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints warnings there, and programs read what we print
            try:
                return command(cluster, options, config)
            finally:
                cluster.close()
    except ConfigError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except BatonError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton cluster", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., int], help: str, *, waits: bool = False) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=help, description=help)
        found.set_defaults(run=run)
        found.add_argument(
            "--address",
            default=os.environ.get("RAY_ADDRESS", "auto"),
            help="of Ray's head: HOST:PORT or auto on a host of the Ray cluster, ray://HOST:10001 on any other "
            "[default: RAY_ADDRESS, or auto]",
        )
        found.add_argument("--name", help='the cluster, if Ray has several [default: "baton", or as in --config]')
        if waits:
            found.add_argument(
                "--timeout",
                type=_seconds,
                default=900.0,
                metavar="S",
                help="seconds to wait for the end [default: 900]",
            )
        return found

    up = command("up", _up, "Place and start everything, and wait until it serves.", waits=True)
    up.add_argument("--config", type=Path, required=True, metavar="FILE", help="the groups of the cluster, in TOML")
    up.add_argument("--autoscale", action="store_true", help="follow the gateways' advice within the groups' bounds")
    scale = command("scale", _scale, "Change how many processes the groups have.")
    for role in ROLES:
        scale.add_argument(f"--{role}", type=int, metavar="N", help=f"processes of the group {role}")
    scale.add_argument("--autoscale", action=argparse.BooleanOptionalAction, help="follow the gateways' advice, or not")
    upgrade = command("upgrade", _upgrade, "Replace all processes, one after the other, by drain.", waits=True)
    upgrade.add_argument("--config", type=Path, metavar="FILE", help="new groups; without it, everything starts afresh")
    status = command("status", _status, "Show the processes.")
    status.add_argument("--json", action="store_true", help="as JSON")
    logs = command("logs", _logs, "Show what processes wrote last.")
    logs.add_argument("process", nargs="?", metavar="NAME", help=f"a process, or {SUPERVISOR}; without it, all")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    logs.add_argument(
        "-n", "--lines", type=_num_lines, default=50, metavar="N", help="lines of each to begin with [default: 50]"
    )
    command("down", _down, "Drain and stop everything.", waits=True)
    return parser


def _num_lines(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, at least 0, not {text!r}")
    return seconds


class NoCluster(ClusterFailed):
    """No cluster of this name runs, or it has ended."""


class NoAnswer(ClusterFailed):
    """An actor has not answered in time."""


class Cluster:
    """The actors of a cluster, which are reached when the first one is called."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self._output = sys.stdout
        self._address = address
        self._supervisor: Any = None

    @functools.cached_property
    def _ray(self) -> Any:
        """Ray, connected. Raises ConfigError: it is not installed, or not there."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"cluster {needs_extra('ray')}") from error
        is_client = self._address.startswith(CLIENT)
        if is_client and importlib.util.find_spec("grpc") is None:
            raise ConfigError(f"--address {self._address} {needs_extra('ray')} (no module named grpc)")
        try:
            self._connect(ray)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            what = "is it running, with grpcio, and are versions and token the same?" if is_client else ""
            raise ConfigError(
                f"--address {self._address}: no Ray cluster answers ({_first_line(error)}); "
                f"{what or 'start one with ray start'}"
            ) from None
        return ray

    def _connect(self, ray: Any) -> None:
        from scripts.cluster_manager.state import NAMESPACE

        if ":" in self._address and not self._address.startswith(CLIENT):
            # Where nothing answers, Ray itself waits for more than ten minutes.
            socket.create_connection(host_and_port(self._address, "--address"), CONNECT_S).close()
        for tries_left in reversed(range(CLIENT_TRIES)):
            try:
                ray.init(address=self._address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
                break
            except ConnectionAbortedError:
                if not tries_left:
                    raise

    def start(self, config: ClusterConfig, *, is_autoscaling: bool) -> None:
        """Start the supervisor.

        Raises:
            ConfigError: it is up already, or Ray would refuse a group.
            ClusterFailed: Ray does not answer.
        """
        ray = self._ray
        from scripts.cluster_manager.instances import check_with_ray  # which imports it, too
        from scripts.cluster_manager.supervisor_actor import ClusterSupervisor

        options = ray.remote(ClusterSupervisor).options(
            name=self.name,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=8,
        )
        check_with_ray(config)
        is_up = ConfigError(
            f"the cluster {self.name!r} is up already; change it with cluster upgrade, or end it with cluster down"
        )
        try:
            with contextlib.suppress(ValueError):
                ray.get_actor(self.name)
                raise is_up
            options.remote(self.name, msgspec.json.encode(config), is_autoscaling)
        except ValueError:  # another command was faster
            raise is_up from None
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise ClusterFailed(f"Ray does not answer ({_first_line(error)}); try again") from None

    def call(self, method: str, *words: Any, process: str = "", timeout_s: float = CALL_S) -> Any:
        """Call a method of the supervisor, or of a process's actor. Raises ClusterFailed."""
        ray = self._ray
        actor_name = f"{self.name}/{process}" if process else self.name
        try:
            # Found once: from outside of the Ray cluster this takes a task, which fails while a cluster ends.
            actor = ray.get_actor(actor_name) if process or self._supervisor is None else self._supervisor
            self._supervisor = self._supervisor if process else actor
            return ray.get(getattr(actor, method).remote(*words), timeout=timeout_s)
        except ValueError:
            if process:
                raise ClusterFailed(
                    f"the cluster {self.name!r} has no process {process!r}; see cluster status"
                ) from None
            raise NoCluster(f"there is no cluster {self.name!r}; cluster up starts one") from None
        except (ray.exceptions.RayError, ConnectionError) as error:  # the latter: of Ray's client
            if not process and isinstance(error, ray.exceptions.ActorDiedError):  # its supervisor ends with it
                self._supervisor = None  # the next cluster of this name has another one
                raise NoCluster(f"the cluster {self.name!r} has ended") from None
            failure = NoAnswer if isinstance(error, ray.exceptions.GetTimeoutError) else ClusterFailed
            raise failure(
                f"{actor_name} does not answer ({_first_line(error)}); try again when its host is back"
            ) from None

    def close(self) -> None:
        """Disconnect, after which Ray prints no more."""
        if "_ray" in self.__dict__:
            self._ray.shutdown()

    def print(self, text: str) -> None:
        """Write a line to standard output."""
        print(text, file=self._output, flush=True)

    def status(self, timeout_s: float = CALL_S) -> Status:
        return msgspec.json.decode(self.call("status", timeout_s=timeout_s), type=Status)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


# ---- the commands ---------------------------------------------------------------------------------------------------


def _up(cluster: Cluster, options: argparse.Namespace, config: ClusterConfig | None) -> int:
    assert config is not None
    if options.autoscale and not (config.prefill.autoscale or config.decode.autoscale):
        raise ConfigError("--autoscale needs bounds: add prefill.autoscale or decode.autoscale to the file")
    cluster.start(config, is_autoscaling=options.autoscale)
    _wait(cluster, options.timeout, is_settled, "ready", fails=True)
    for row in cluster.status().rows:
        if row.role == "gateway":
            cluster.print(f"ready {row.url}")
    return 0


def _scale(cluster: Cluster, options: argparse.Namespace, config: ClusterConfig | None) -> int:
    counts = {role: count for role in ROLES if (count := getattr(options, role)) is not None}
    if not counts and options.autoscale is None:
        raise ConfigError("scale needs --gateway, --prefill or --decode with a number, or --autoscale")
    for role, count in counts.items():
        if count < 0:
            raise ConfigError(f"--{role} must be at least 0, not {count}")
    if problem := cluster.call("scale", counts, options.autoscale):
        raise ConfigError(problem)
    return 0


def _upgrade(cluster: Cluster, options: argparse.Namespace, config: ClusterConfig | None) -> int:
    if problem := cluster.call("upgrade", None if config is None else msgspec.json.encode(config)):
        raise ConfigError(problem)
    _wait(cluster, options.timeout, is_settled, "upgraded", fails=True)
    cluster.print("upgraded")
    return 0


def _status(cluster: Cluster, options: argparse.Namespace, config: ClusterConfig | None) -> int:
    status = cluster.status()
    cluster.print(msgspec.json.format(msgspec.json.encode(status)).decode() if options.json else table(status))
    return 0


def _logs(cluster: Cluster, options: argparse.Namespace, config: ClusterConfig | None) -> int:
    names: list[str] = [options.process] if options.process else []
    since: dict[str, int] = {}
    first = -options.lines
    timeout_s = FOLLOW_S if options.follow else CALL_S
    try:
        while True:
            if not options.process:
                names = _processes(cluster, names, timeout_s)
            width = max(map(len, names)) if len(names) > 1 else 0
            for name in names:
                since.setdefault(name, first)
                try:
                    since[name], lines = _lines(cluster, name, since[name], timeout_s)
                except ClusterFailed as error:
                    is_silent = options.follow and isinstance(error, NoAnswer)
                    if options.process and not is_silent:
                        raise
                    lines = [f"({error})"] if not options.follow else []
                for line in lines:
                    cluster.print(f"{name:{width}} | {line}" if width else line)
            if not options.follow:
                return 0
            first = 0  # of a process that starts later, all lines
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return 130


def _processes(cluster: Cluster, before: list[str], timeout_s: float) -> list[str]:
    """The supervisor and all processes; those from before while the supervisor does not answer."""
    try:
        status = cluster.status(timeout_s if before else CALL_S)
        return [SUPERVISOR, *(row.name for row in status.rows)]
    except NoCluster:
        raise
    except ClusterFailed:
        if not before:
            raise
        return before


def _lines(cluster: Cluster, name: str, since: int, timeout_s: float) -> tuple[int, list[str]]:
    method, process = ("events", "") if name == SUPERVISOR else ("logs", name)
    found: tuple[int, list[str]] = cluster.call(method, since, process=process, timeout_s=timeout_s)
    return found


def _down(cluster: Cluster, options: argparse.Namespace, config: ClusterConfig | None) -> int:
    try:
        cluster.call("down")
    except NoCluster as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 0
    with contextlib.suppress(NoCluster):  # the supervisor ends last
        _wait(cluster, options.timeout, lambda _: False, "down", fails=False)
    return 0


def _wait(cluster: Cluster, timeout_s: float, is_done: Callable[[Status], bool], what: str, *, fails: bool) -> None:
    """Return once it is done; shows what the supervisor does meanwhile.

    Args:
        fails: a failure of a process ends the wait.
    Raises:
        ClusterFailed: it failed, or it is not done in time.
    """
    ends_at = time.monotonic() + timeout_s
    since = -1
    while not is_done(status := cluster.status()):
        since, lines = cluster.call("events", since)
        for line in lines:
            print(f"cluster: {line}", file=sys.stderr)
        if fails and status.failures:
            reasons = "\n".join(status.failures.values())
            raise ClusterFailed(
                f"not {what}: {reasons}\n"
                "The supervisor tries again; correct it with cluster upgrade, or end it with cluster down"
            )
        if time.monotonic() > ends_at:
            raise ClusterFailed(f"not {what} after --timeout {timeout_s:g} s:\n{table(status)}")
        time.sleep(POLL_S)
