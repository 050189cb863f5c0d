"""What NIXL's writer keeps of each reader and of each write under way. Makes no call to NIXL."""

import hmac
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from common.config.shared import UCX
from common.wire.messages import Connect
from kv_transfer.transports.shm.reader import is_dead


def host_id() -> str:
    """Identify the running system, whatever its containers are called; empty if it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


Kind = Literal["DRAM", "VRAM"]


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory as NIXL names it. ``device``: which GPU of its process, for VRAM."""

    at: int
    kind: Kind = "DRAM"
    device: int = 0

    def run(self, offset: int, size: int) -> tuple[int, int, int]:
        """A descriptor of ``size`` bytes at this offset."""
        return self.at + offset, size, self.device


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reader's offer.

    Attributes:
        agent: the metadata of its agent, in base64.
        pool_at, probe_at, kind, device: where its memory is.
        watch_address: where writers of its host ask to be watched.
        host: its ``host_id``.
        voided: offers under epochs up to this one reach its memory no more.
        backend: of NIXL.
        seal: over all the rest; see ``sealed``.
    """

    agent: str
    pool_at: int
    probe_at: int
    watch_address: str
    host: str = ""
    voided: int = 0
    kind: Kind = "DRAM"
    device: Annotated[int, msgspec.Meta(ge=0, le=1_023)] = 0
    backend: Annotated[str, msgspec.Meta(max_length=64)] = UCX
    seal: str = ""

    @property
    def pool(self) -> MemoryRegion:
        return MemoryRegion(self.pool_at, self.kind, self.device)

    @property
    def probe(self) -> MemoryRegion:
        return MemoryRegion(self.probe_at, self.kind, self.device)


def sealed(endpoint: Endpoint, key: bytes) -> str:
    """An offer as it is sent.

    NIXL trusts the metadata of an agent: one wrong bit crashes the process, or makes NIXL refuse the true offer for
    good. So only metadata from a node with the cluster's key reaches it, or, without a key, metadata that arrived
    unchanged.
    """
    return msgspec.json.encode(msgspec.structs.replace(endpoint, seal=_seal(endpoint, key))).decode()


def opened(offer: str, key: bytes) -> Endpoint:
    """The offer that ``sealed`` made.

    Raises:
        ValueError: it is no such offer, was changed, or was sealed with another key.
    """
    try:
        endpoint = msgspec.json.decode(offer, type=Endpoint)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if not hmac.compare_digest(endpoint.seal.encode(), _seal(endpoint, key).encode()):
        raise ValueError("it was changed, or sealed with another --cluster-key")
    return endpoint


def _seal(endpoint: Endpoint, key: bytes) -> str:
    return hmac.new(key, msgspec.json.encode(msgspec.structs.replace(endpoint, seal="")), "sha256").hexdigest()


@dataclass(slots=True, eq=False)
class Write:
    """A write under way. ``ticket`` 0: a probe. ``is_failed``: NIXL gave up, but the bytes may still move."""

    peer_state: "PeerState"
    ticket: int
    handle: Any
    num_bytes: int = 0
    is_failed: bool = False
    begun_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class PeerState:
    """A peer under one epoch.

    Attributes:
        num_open: writes that were asked for and are not over.
        s_per_byte: how long it takes to begin a write, measured by the last large one; at first, an estimate for a
            slow host.
        has_answer: the end of the attachment has been reported, or is about to be.
    """

    peer: str
    connect: Connect
    endpoint: Endpoint
    patience_s: float
    until: float = 0.0
    key: tuple[bytes, int, int] = (b"", 0, 0)
    agent: Any = None
    pages: Any = None
    watch_socket: socket.socket | None = None
    pidfd: int = -1
    num_open: int = 0
    s_per_byte: float = 2.5e-10
    num_probes: int = 0  # probes under way; they reach no page
    probe_area: int = -1  # area of the probe memory that it occupies; -1: none
    failed: list[int] = field(default_factory=list)  # tickets that failed before it was detached
    has_answer: bool = False
    is_detached: bool = False
    is_gone: bool = False
    is_voided: bool = False  # the reader says that none of its writes can reach its memory any more
    steps: Iterator[None] | None = None  # of the attachment, while it goes on

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.patience_s

    def close_watch(self) -> None:
        """Close the watch socket and the pidfd. The reader takes no meaning from that: writes under way go on."""
        if self.watch_socket is not None:
            self.watch_socket.close()
            self.watch_socket = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    @property
    def is_reader_dead(self) -> bool:
        return self.pidfd >= 0 and is_dead(self.pidfd)
