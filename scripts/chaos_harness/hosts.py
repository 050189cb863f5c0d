"""Hosts as network namespaces on one network, each with an address and a boot id of its own, and with its own clock if
the link says so. Needs root, and ``ip`` of iproute2.

The network is a bridge. Where packets are to be late or lost and this kernel has no ``netem``, it is a relay in user
space instead (``relay``).
"""

import contextlib
import itertools
import os
import random
import string
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import BatonError
from scripts.chaos_harness import relay
from scripts.serving.bound_process import bound_command
from scripts.temporary_folder import TemporaryFolder

BRIDGE_NUMBER = 254
#: Runs a command with another boot id, by which two hosts know that they do not share memory.
WITH_BOOT_ID = 'mount --bind "$1" /proc/sys/kernel/random/boot_id && shift && exec "$@"'
RELAY_STOP_S = 10.0
_NUMBERS = itertools.count()  # of all hosts of this process


@dataclass(frozen=True, slots=True)
class Link:
    """What is between any two hosts.

    Attributes:
        loss: share of the packets that are lost.
        delay_s: how long a packet travels, in one direction.
        clock_step_s: by how much the monotonic clock of each host is ahead of the clock of the host before it.
        is_relayed: packets go through the relay, which can silence connections on any kernel.
    """

    mtu: int = 1_500
    loss: float = 0.0
    delay_s: float = 0.0
    clock_step_s: int = 0
    is_relayed: bool = False

    @property
    def netem(self) -> tuple[str, ...]:
        """The discipline of each of the two devices that a packet leaves; empty for a link without faults.

        A packet from a host to this machine leaves only one of them: it has half of the delay, and of the loss.
        """
        if not (self.loss or self.delay_s):
            return ()
        words = ("netem", "limit", "100000", "delay", f"{self.delay_s * 500:g}ms")
        return (*words, "loss", f"{(1 - (1 - self.loss) ** 0.5) * 100:.4g}%") if self.loss else words


class NoNamespaces(BatonError):
    """This machine makes no network namespaces for this user."""


def run(*words: str) -> str:
    """Run ``ip`` or ``tc``. Raises subprocess.CalledProcessError, FileNotFoundError."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def _free_subnet() -> str:
    """The first three numbers of addresses to which this machine has no route yet."""
    numbers = random.SystemRandom().sample(range(256), 256)
    return next(
        subnet for subnet in (f"10.213.{n}" for n in numbers) if not run("ip", "route", "show", f"{subnet}.0/24")
    )


def _namespace(tag: str, name: str) -> str:
    return f"baton-{tag}-{name}"


def _bridge(tag: str) -> str:
    return f"bt{tag}"


def _remove_network(folder: Path) -> None:
    """Remove the namespaces and the bridge of the hosts whose boot ids are in a folder."""
    for place in folder.glob("*/*"):
        with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
            run("ip", "netns", "delete", _namespace(place.parent.name, place.name))
    for place in folder.glob("*/"):
        with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
            run("ip", "link", "delete", _bridge(place.name))


class Hosts:
    """Network namespaces by name; ``close`` removes them and the network, or else the next hosts do.

    Attributes:
        has_bridge: the network is a bridge, and so can be given further faults.

    Raises NoNamespaces: they cannot be made here.
    """

    def __init__(self, names: Sequence[str], link: Link | None = None) -> None:
        self._between = link or Link()
        self._folder = TemporaryFolder("baton-hosts-", undo=_remove_network)
        self._relay: subprocess.Popen[bytes] | None = None
        self.has_bridge = True
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        # The kernel takes a moment to remove the devices of a namespace, so that their names are not used again.
        self._tag = f"{os.getpid()}{string.ascii_lowercase[next(_NUMBERS) % 26]}"
        self._bridge = _bridge(self._tag)
        self._boot_ids = self._folder.path / self._tag
        self._boot_ids.mkdir()
        try:
            self._subnet = _free_subnet()
            for name in names:
                (self._boot_ids / name).write_text(f"{uuid.uuid4()}\n")
                run("ip", "netns", "add", self.namespace(name))
            self._add_bridge()
            if self._between.is_relayed or (self._between.netem and not self._delay_all()):
                self.has_bridge = False
                run("ip", "link", "delete", self._bridge)
                self._add_relay()
        except (subprocess.CalledProcessError, OSError) as error:
            self.close()
            raise NoNamespaces(f"no network namespaces here: {getattr(error, 'stderr', error)}".strip()) from None

    def _add_bridge(self) -> None:
        mtu = str(self._between.mtu)
        run("ip", "link", "add", self._bridge, "mtu", mtu, "type", "bridge")
        run("ip", "address", "add", f"{self.bridge_address}/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        for name in self._numbers:
            far = ("peer", "name", "eth0", "mtu", mtu, "netns", self.namespace(name))
            run("ip", "link", "add", self.link(name), "mtu", mtu, "type", "veth", *far)
            run("ip", "link", "set", self.link(name), "master", self._bridge, "up")
            self._bring_up(name)

    def _bring_up(self, name: str) -> None:
        run("ip", "-n", self.namespace(name), "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            run("ip", "-n", self.namespace(name), "link", "set", device, "up")

    def _delay_all(self) -> bool:
        """Delay and lose packets of all hosts; False if this kernel has no ``netem``."""
        try:
            run("tc", "qdisc", "add", "dev", self._bridge, "root", *self._between.netem)
        except (subprocess.CalledProcessError, FileNotFoundError):
            return False
        return all(self.shape(name, self._between.netem) for name in self._numbers)

    def _add_relay(self) -> None:
        """Connect the hosts by TUN devices, whose packets a process of its own passes on."""
        for name in self._numbers:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "link", "delete", self.link(name))
        mtu, devices = str(self._between.mtu), []
        with contextlib.ExitStack() as stack:
            for name, address in [("", self.bridge_address), *((name, self.address(name)) for name in self._numbers)]:
                device = self.link(name) if name else self._bridge
                file = stack.enter_context(relay.open_tun(device))
                devices.append((address, file.fileno()))
                run("ip", "link", "set", device, "mtu", mtu)
                if name:
                    run("ip", "link", "set", device, "netns", self.namespace(name), "name", "eth0")
                    self._bring_up(name)
                else:
                    run("ip", "address", "add", f"{address}/24", "dev", device)
                    run("ip", "link", "set", device, "up")
            words = [f"{address}={number}" for address, number in devices]
            program = [sys.executable, relay.__file__, str(self._between.delay_s), str(self._between.loss), *words]
            self._relay = subprocess.Popen(
                bound_command(program),
                pass_fds=[number for _, number in devices],
                stdin=subprocess.PIPE,
            )

    @property
    def has_relay(self) -> bool:
        """Whether packets go through the relay, so that connections can be silenced."""
        return self._relay is not None

    @property
    def bridge_address(self) -> str:
        """The address of this machine on the network."""
        return f"{self._subnet}.{BRIDGE_NUMBER}"

    def namespace(self, name: str) -> str:
        return _namespace(self._tag, name)

    def address(self, name: str) -> str:
        return f"{self._subnet}.{self._numbers[name]}"

    def link(self, name: str) -> str:
        """The end of the host's network link on the bridge."""
        return f"bt{self._tag}-{self._numbers[name]}"

    def command(self, name: str, *words: object) -> list[str]:
        """The command line that runs a command on a host."""
        boot_id = self._boot_ids / name
        line = ["ip", "netns", "exec", self.namespace(name), "sh", "-c", WITH_BOOT_ID, "sh", str(boot_id)]
        if self._between.clock_step_s:
            ahead = str(self._between.clock_step_s * self._numbers[name])
            line += ["unshare", "--time", "--monotonic", ahead, "--boottime", ahead]
        return [*line, *map(str, words)]

    # ---- faults ------------------------------------------------------------------------------------------------------

    def shape(self, name: str, *disciplines: Sequence[str]) -> str:
        """Apply the first queueing discipline that this kernel has to both directions, in place of what every link has;
        return it, or an empty text.
        """
        for words in disciplines:
            try:
                self._set_discipline(name, words)
                return " ".join(words)
            except (subprocess.CalledProcessError, FileNotFoundError):
                self.unshape(name)
        return ""

    def _set_discipline(self, name: str, words: Sequence[str]) -> None:
        """Replace the queueing disciplines of a host's two devices."""
        run("tc", "qdisc", "replace", "dev", self.link(name), "root", *words)
        run("ip", "netns", "exec", self.namespace(name), "tc", "qdisc", "replace", "dev", "eth0", "root", *words)

    def unshape(self, name: str) -> None:
        """Give a host's link the faults that every link has, or none."""
        with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
            run("tc", "qdisc", "del", "dev", self.link(name), "root")
        with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
            run("ip", "netns", "exec", self.namespace(name), "tc", "qdisc", "del", "dev", "eth0", "root")
        if self._between.netem:
            with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
                self._set_discipline(name, self._between.netem)

    def cut(self, name: str) -> None:
        """Drop all packets to and from a host, without an error to either end."""
        run("ip", "link", "set", self.link(name), "nomaster")

    def heal(self, name: str) -> None:
        run("ip", "link", "set", self.link(name), "master", self._bridge)

    def reset(self, name: str, other: str, *, spared_port: int) -> None:
        """Break every TCP connection between two hosts, as a reset by the network would, except those to a port."""
        spared = f"not ( dport = :{spared_port} or sport = :{spared_port} )"
        run(*self.command(name, "ss", "-K", "-t", f"dst {self.address(other)} and {spared}"))

    def silence(self, name: str, other: str, *, spared_port: int) -> None:
        """Drop what goes over the TCP connections that two hosts have now, except those to a port, without an error to
        either end. Connections made later work. The link must be relayed.
        """
        assert self._relay is not None and self._relay.stdin is not None
        command = f"{self.address(name)} {self.address(other)} {spared_port}\n"
        self._relay.stdin.write(command.encode())
        self._relay.stdin.flush()

    def block(self, name: str, other: str) -> None:
        """Let nothing pass from one host to another."""
        run("ip", "-n", self.namespace(name), "route", "add", "blackhole", f"{self.address(other)}/32")

    def unblock(self, name: str, other: str) -> None:
        run("ip", "-n", self.namespace(name), "route", "del", "blackhole", f"{self.address(other)}/32")

    def close(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait(RELAY_STOP_S)
            if self._relay.stdin is not None:
                self._relay.stdin.close()
        _remove_network(self._folder.path)
        self._folder.close()
