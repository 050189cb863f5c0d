"""What NIXL's writer keeps of each reader and of each write under way. No calls to NIXL."""

import hmac
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from common.wire.messages import Connect


def host_id() -> str:
    """Which running system this is, whatever its containers are called; empty: it does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


Kind = Literal["DRAM", "VRAM"]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory as NIXL names it. ``device``: of VRAM, which GPU of its process."""

    at: int
    kind: Kind = "DRAM"
    device: int = 0

    def run(self, offset: int, size: int) -> tuple[int, int, int]:
        """A descriptor of so many bytes from there on."""
        return self.at + offset, size, self.device


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader offers.

    Attributes:
        agent: its metadata, in base64.
        pool_at, probe_at, kind, device: where its memory is.
        door: where writers of its host ask to be watched.
        host: as ``host_id`` says.
        voided: what was offered under epochs up to this one reaches its memory no more.
        seal: over all the rest; see ``sealed``.
    """

    agent: str
    pool_at: int
    probe_at: int
    door: str
    host: str = ""
    voided: int = 0
    kind: Kind = "DRAM"
    device: Annotated[int, msgspec.Meta(ge=0, le=1_023)] = 0
    seal: str = ""

    @property
    def pool(self) -> Region:
        return Region(self.pool_at, self.kind, self.device)

    @property
    def probe(self) -> Region:
        return Region(self.probe_at, self.kind, self.device)


def sealed(endpoint: Endpoint, key: bytes) -> str:
    """An offer as it is sent. NIXL trusts what it is told of an agent: one bit that came wrong brings the process down,
    or makes it refuse the true offer for good. So nothing reaches it but what a node said that has the cluster's key,
    or, where there is none, what came as it was sent."""
    return msgspec.json.encode(msgspec.structs.replace(endpoint, seal=_seal(endpoint, key))).decode()


def opened(offer: str, key: bytes) -> Endpoint:
    """The offer that ``sealed`` made. Raises ``ValueError`` if it is another one."""
    endpoint = msgspec.json.decode(offer, type=Endpoint)
    if not hmac.compare_digest(endpoint.seal.encode(), _seal(endpoint, key).encode()):
        raise ValueError("it was changed, or sealed with another --cluster-key")
    return endpoint


def _seal(endpoint: Endpoint, key: bytes) -> str:
    return hmac.new(key, msgspec.json.encode(msgspec.structs.replace(endpoint, seal="")), "sha256").hexdigest()


@dataclass(slots=True, eq=False)
class Write:
    """Under way. ``ticket`` 0: a probe. ``is_failed``: NIXL gave up, but nothing proves that the bytes did."""

    route: "Route"
    ticket: int
    handle: Any
    num_bytes: int = 0
    is_failed: bool = False
    begun_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class Route:
    """A peer under one epoch.

    Attributes:
        num_open: writes that were asked for and are not over.
        s_per_byte: how long it takes to begin a write, by the last one that told; before that, as a slow host copies.
    """

    peer: str
    connect: Connect
    endpoint: Endpoint
    patience_s: float
    until: float = 0.0
    key: tuple[bytes, int, int] = (b"", 0, 0)
    agent: Any = None
    pages: Any = None
    door: socket.socket | None = None
    pidfd: int = -1
    num_open: int = 0
    s_per_byte: float = 2.5e-10
    num_probes: int = 0  # the same, of the thread's own; they reach no page
    failed: list[int] = field(default_factory=list)  # tickets that came to nothing before it was detached from
    is_detached: bool = False
    is_gone: bool = False
    is_void: bool = False  # the reader says that nothing of it can reach its memory any more
    steps: deque[Callable[[], bool]] = field(default_factory=deque)  # of attaching, each called until it says True

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.patience_s

    def hang_up(self) -> None:
        """To the reader this says nothing: what is under way goes on."""
        if self.door is not None:
            self.door.close()
            self.door = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    @property
    def is_reader_dead(self) -> bool:
        return self.pidfd >= 0 and bool(select.select([self.pidfd], [], [], 0)[0])
