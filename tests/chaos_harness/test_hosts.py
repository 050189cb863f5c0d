"""Hosts as network namespaces: their links, clocks and identities."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from support.service.hosts import make_hosts
from support.service.processes import environment

from common.config.options import options_of
from common.errors import ConfigError
from scripts.chaos_harness import hosts as hosts_module
from scripts.chaos_harness import relay
from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.hosts import Hosts, Link

#: Sends datagrams to an address, and then empty ones without end; all of them keep their order.
SEND = """
import socket, sys, time
to = (sys.argv[1], 5_000)
sender = socket.socket(type=socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    sender.sendto(bytes(int(sys.argv[3])), to)
while True:
    sender.sendto(b"", to)
    time.sleep(0.01)
"""
#: Counts datagrams until an empty one comes.
COUNT = """
import socket, sys
listener = socket.socket(type=socket.SOCK_DGRAM)
listener.bind((sys.argv[1], 5_000))
print("ready", flush=True)
sizes = [len(one) for one in iter(lambda: listener.recv(65_536), b"")]
print(len(sizes), max(sizes, default=0))
"""


@pytest.fixture
def make() -> Iterator[Callable[[Link], Hosts]]:
    made: list[Hosts] = []

    def begin(link: Link) -> Hosts:
        made.append(make_hosts(["a", "b"], link))
        return made[-1]

    yield begin
    for hosts in made:
        hosts.close()


def run_on(hosts: Hosts, name: str, *words: object) -> str:
    found = subprocess.run(hosts.command(name, *words), capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout


def received(hosts: Hosts, count: int, size: int) -> tuple[int, int]:
    """How many of so many datagrams of a size come from a to b, and the largest."""
    words = hosts.command("b", sys.executable, "-c", COUNT, hosts.address("b"))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as counter:
        assert counter.stdout is not None
        assert counter.stdout.readline() == "ready\n"
        with subprocess.Popen(
            hosts.command("a", sys.executable, "-c", SEND, hosts.address("b"), count, size)
        ) as sender:
            number, largest = counter.stdout.read().split()
            sender.kill()
    return int(number), int(largest)


def test_packets_are_lost_and_larger_ones_are_divided_by_the_mtu(make: Callable[[Link], Hosts]) -> None:
    hosts = make(Link(mtu=1_400, loss=0.3, delay_s=0.01))
    count, _ = received(hosts, 200, 100)
    assert 100 < count < 180
    assert "mtu 1400" in run_on(hosts, "a", "ip", "link", "show", "eth0")


def test_a_link_without_faults_loses_nothing(make: Callable[[Link], Hosts]) -> None:
    assert received(make(Link(mtu=9_000)), 5, 8_000) == (5, 8_000)


@pytest.mark.parametrize("link", [Link(clock_step_s=200), Link(loss=0.01, clock_step_s=200)], ids=["bridge", "lossy"])
def test_hosts_have_clocks_and_boot_ids_of_their_own(make: Callable[[Link], Hosts], link: Link) -> None:
    hosts = make(link)
    clock = "import time; print(time.monotonic())"
    first, second = (float(run_on(hosts, name, sys.executable, "-c", clock)) for name in ("a", "b"))
    assert 195 < second - first < 260
    boot_ids = {run_on(hosts, name, "cat", "/proc/sys/kernel/random/boot_id") for name in ("a", "b")}
    assert len(boot_ids) == 2


def test_nothing_of_the_hosts_is_left_behind(make: Callable[[Link], Hosts]) -> None:
    hosts = make(Link(loss=0.01))
    names = [hosts.namespace(name) for name in ("a", "b")]
    process = hosts._relay
    hosts.close()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in names)
    assert process is None or process.poll() is not None


def test_the_next_hosts_remove_those_of_a_killed_process(make: Callable[[Link], Hosts]) -> None:
    make(Link())  # skips where there are no namespaces
    program = (
        "import signal\nfrom scripts.chaos_harness.hosts import Hosts\n"
        "hosts = Hosts(['a', 'b'])\nprint(hosts._tag, hosts._folder.path, flush=True)\nsignal.pause()"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as maker:
        assert maker.stdout is not None
        tag, folder = maker.stdout.readline().split()
        shown = [("ip", "netns", "list"), ("ip", "-brief", "link", "show", "type", "bridge")]
        assert all(tag in hosts_module.run(*command) for command in shown)
        maker.kill()
    make(Link())
    assert not any(tag in hosts_module.run(*command) for command in shown)
    assert not os.path.exists(folder)


def test_a_fault_of_one_link_leaves_those_of_every_link_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the commands show it: many kernels have no ``netem``."""
    said: list[str] = []

    def run(*words: str) -> str:
        said.append(" ".join(words))
        return ""

    monkeypatch.setattr(hosts_module, "run", run)
    hosts = Hosts(["a"], Link(loss=0.5, delay_s=0.1))
    permanent = [words.partition("root ")[2] for words in said if "qdisc" in words][-2:]
    assert permanent == [" ".join(Link(loss=0.5, delay_s=0.1).netem)] * 2
    assert hosts.shape("a", ("netem", "loss", "10%")) == "netem loss 10%"
    hosts.unshape("a")
    hosts.close()
    changes = [words for words in said if "qdisc replace" in words]
    assert [words.partition("root ")[2] for words in changes[-4:]] == ["netem loss 10%"] * 2 + permanent


def test_the_relay_delivers_by_destination_and_drops_what_has_none() -> None:
    """Pairs of sockets stand for the devices."""

    def packet(to: str, body: bytes) -> bytes:
        return bytes(16) + socket.inet_aton(to) + body

    ends = [socket.socketpair(type=socket.SOCK_SEQPACKET) for _ in range(2)]
    (a, inner_a), (b, inner_b) = ends
    b.settimeout(30)
    pid = os.fork()
    if pid == 0:
        devices = {"10.0.0.1": inner_a.fileno(), "10.0.0.2": inner_b.fileno()}
        try:
            relay.relay({socket.inet_aton(address): number for address, number in devices.items()}, 0.02, 0.0)
        finally:
            os._exit(1)
    try:
        a.send(packet("10.0.0.9", b"to no device"))
        for number in range(3):
            a.send(packet("10.0.0.2", bytes([number])))
        assert [b.recv(100)[-1] for _ in range(3)] == [0, 1, 2]
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        for end in (a, b, inner_a, inner_b):
            end.close()


@pytest.mark.parametrize("name", ["mtu", "packet_loss", "packet_delay", "clock_step"])
def test_options_of_the_network_need_namespaces(name: str) -> None:
    flag = options_of(ChaosConfig)[name].flag
    with pytest.raises(ConfigError, match=f"{flag} needs --namespaces"):
        ChaosConfig(**{name: 1_400})  # type: ignore[arg-type]
    assert ChaosConfig(**{name: 1_400}, namespaces=True).namespaces  # type: ignore[arg-type]


def packet(source: str, target: str, *, flags: int = 0x10, protocol: int = 6) -> bytes:
    """An IPv4 packet between two addresses with ports."""
    (host, port), (to, to_port) = source.split(":"), target.split(":")
    ip = bytes([0x45]) + bytes(8) + bytes([protocol, 0, 0]) + socket.inet_aton(host) + socket.inet_aton(to)
    return ip + int(port).to_bytes(2, "big") + int(to_port).to_bytes(2, "big") + bytes(9) + bytes([flags]) + bytes(6)


def test_the_relay_drops_connections_that_existed_when_they_were_silenced() -> None:
    silence = relay.Silence()
    old, back = packet("10.0.0.1:5000", "10.0.0.2:4001"), packet("10.0.0.2:4001", "10.0.0.1:5000")
    assert not silence.has(old)
    silence.begin("10.0.0.2 10.0.0.1 8002\n")
    assert silence.has(old) and silence.has(back)
    assert not silence.has(packet("10.0.0.2:5001", "10.0.0.1:8002"))
    assert not silence.has(packet("10.0.0.1:5000", "10.0.0.3:4001"))
    assert not silence.has(packet("10.0.0.1:5000", "10.0.0.2:4001", protocol=17))
    assert not silence.has(packet("10.0.0.1:5002", "10.0.0.2:4001", flags=0x02))
    assert not silence.has(packet("10.0.0.2:4001", "10.0.0.1:5002", flags=0x12))
    assert not silence.has(packet("10.0.0.1:5002", "10.0.0.2:4001"))
    assert silence.has(old)
