"""Hosts as network namespaces on one bridge, each with an address of its own. Needs root, and ``ip`` of iproute2."""

import contextlib
import os
import random
import subprocess
from collections.abc import Sequence

from common.errors import BatonError

BRIDGE_NUMBER = 254


class NoNamespaces(BatonError):
    """This machine makes no network namespaces for this user."""


def run(*words: str) -> str:
    """Run ``ip`` or ``tc``. Raises subprocess.CalledProcessError, FileNotFoundError."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


class Hosts:
    """Network namespaces by name; ``close`` removes them and the bridge.

    Raises NoNamespaces: they cannot be made here.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._tag = f"{os.getpid() % 10_000}"
        self._subnet = f"10.213.{random.SystemRandom().randrange(256)}"
        self._bridge = f"bt{self._tag}"
        try:
            run("ip", "link", "add", self._bridge, "type", "bridge")
            run("ip", "address", "add", f"{self.bridge_address}/24", "dev", self._bridge)
            run("ip", "link", "set", self._bridge, "up")
            for name in names:
                self._add(name)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            self.close()
            raise NoNamespaces(f"no network namespaces here: {getattr(error, 'stderr', error)}".strip()) from None

    def _add(self, name: str) -> None:
        namespace = self.namespace(name)
        run("ip", "netns", "add", namespace)
        run("ip", "link", "add", self.link(name), "type", "veth", "peer", "name", "eth0", "netns", namespace)
        run("ip", "link", "set", self.link(name), "master", self._bridge, "up")
        run("ip", "-n", namespace, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            run("ip", "-n", namespace, "link", "set", device, "up")

    @property
    def bridge_address(self) -> str:
        """The address of this machine on the bridge."""
        return f"{self._subnet}.{BRIDGE_NUMBER}"

    def namespace(self, name: str) -> str:
        return f"baton-{self._tag}-{name}"

    def address(self, name: str) -> str:
        return f"{self._subnet}.{self._numbers[name]}"

    def link(self, name: str) -> str:
        """The end of the host's network link on the bridge."""
        return f"bt{self._tag}-{self._numbers[name]}"

    def command(self, name: str, *words: object) -> list[str]:
        """The command line that runs a command on a host."""
        return ["ip", "netns", "exec", self.namespace(name), *map(str, words)]

    # ---- faults ------------------------------------------------------------------------------------------------------

    def shape(self, name: str, *disciplines: Sequence[str]) -> str:
        """Apply the first queueing discipline that this kernel has to both directions; returns it, or an empty text."""
        for words in disciplines:
            try:
                run("tc", "qdisc", "add", "dev", self.link(name), "root", *words)
                run("ip", "netns", "exec", self.namespace(name), "tc", "qdisc", "add", "dev", "eth0", "root", *words)
                return " ".join(words)
            except (subprocess.CalledProcessError, FileNotFoundError):
                self.unshape(name)
        return ""

    def unshape(self, name: str) -> None:
        with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
            run("tc", "qdisc", "del", "dev", self.link(name), "root")
        with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
            run("ip", "netns", "exec", self.namespace(name), "tc", "qdisc", "del", "dev", "eth0", "root")

    def cut(self, name: str) -> None:
        """Drop all packets to and from a host, without an error to either end."""
        run("ip", "link", "set", self.link(name), "nomaster")

    def heal(self, name: str) -> None:
        run("ip", "link", "set", self.link(name), "master", self._bridge)

    def block(self, name: str, other: str) -> None:
        """Let nothing pass from one host to another."""
        run("ip", "-n", self.namespace(name), "route", "add", "blackhole", f"{self.address(other)}/32")

    def unblock(self, name: str, other: str) -> None:
        run("ip", "-n", self.namespace(name), "route", "del", "blackhole", f"{self.address(other)}/32")

    def close(self) -> None:
        for name in self._numbers:
            with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
                run("ip", "netns", "delete", self.namespace(name))
        with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
            run("ip", "link", "delete", self._bridge)
