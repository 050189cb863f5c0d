"""Which transports a node has: the one that was asked for, or with ``auto`` all that work here."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common.config.node import NodeConfig
from common.config.shared import UCX
from common.errors import ConfigError
from common.wire.address import is_loopback
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import ReaderTransport, Transport, WriterTransport
from kv_transfer.transports.negotiation import NegotiatingReader, NegotiatingWriter
from kv_transfer.transports.nixl.devices import restrict_to
from kv_transfer.transports.shm import ShmReader, ShmWriter
from kv_transfer.transports.tcp import TcpReader, TcpWriter

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Transport)

#: What ``auto`` may choose, best first; NIXL from GPU to GPU with ``--gpu-direct``. Gloo is never better than TCP, and
#: NCCL not than NIXL, whereas each of its pairs occupies multiprocessors, so these two must be named.
TRANSPORTS = ("cuda-ipc", "shm", "nixl", "tcp")

#: What ``auto`` means while pages stay on this machine. UCX listens on every interface that it finds and authenticates
#: no peer, so NIXL must be named, or an interface that other machines reach.
LOCAL_TRANSPORTS = ("cuda-ipc", "shm", "tcp")


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """What transports need to know of the node.

    Attributes:
        name: of a transport, or ``auto`` for all that this node can have.
        host: address on which a reader listens for pages.
        cluster_key: empty: none.
        gpu_direct: with NIXL, pages leave from and arrive in a GPU's own memory.
        nixl_backend: what moves pages for NIXL.
    """

    name: str = "auto"
    incarnation: str = ""
    host: str = "127.0.0.1"
    cluster_key: bytes = field(default=b"", repr=False)
    gpu_direct: bool = False
    nixl_backend: str = UCX

    @classmethod
    def of(cls, config: NodeConfig, incarnation: str) -> "TransportSettings":
        key = (config.cluster_key or "").encode()
        return cls(config.transport, incarnation, config.data_host, key, config.gpu_direct, config.nixl_backend)


def open_reader(store: PageStore, settings: TransportSettings) -> NegotiatingReader:
    """The decode node's side.

    Raises:
        ConfigError: the transport that was asked for is not available here; with ``auto``, none is.
    """

    def make(name: str) -> ReaderTransport:
        if name == "shm":
            return ShmReader(store, settings.incarnation)
        if name == "cuda-ipc":
            from kv_transfer.transports.cuda_ipc import CudaIpcReader

            return CudaIpcReader(store, settings.incarnation)
        if name == "nixl":
            from kv_transfer.transports.nixl.reader import NixlReader

            return NixlReader(store, settings.incarnation, **_nixl_options(settings))
        if name in ("gloo", "nccl"):
            from kv_transfer.transports.torch_distributed import GroupReader

            return GroupReader(store, name, host=settings.host, key=settings.cluster_key)
        return TcpReader(store, host=settings.host, key=settings.cluster_key)

    return NegotiatingReader(_available(store, settings, make))


def open_writer(store: PageStore, settings: TransportSettings) -> NegotiatingWriter:
    """The prefill node's side. Raises as ``open_reader``."""

    def make(name: str) -> WriterTransport:
        if name == "shm":
            return ShmWriter(store)
        if name == "cuda-ipc":
            from kv_transfer.transports.cuda_ipc import CudaIpcWriter

            return CudaIpcWriter(store)
        if name == "nixl":
            from kv_transfer.transports.nixl.writer import NixlWriter

            return NixlWriter(store, settings.incarnation, **_nixl_options(settings))
        if name in ("gloo", "nccl"):
            from kv_transfer.transports.torch_distributed import GroupWriter

            return GroupWriter(store, name, key=settings.cluster_key)
        return TcpWriter(store, key=settings.cluster_key)

    return NegotiatingWriter(_available(store, settings, make))


def _nixl_options(settings: TransportSettings) -> dict[str, Any]:
    """What both ends of NIXL are told. The devices that it may use are chosen before its library starts."""
    restrict_to(settings.host)
    return {"key": settings.cluster_key, "is_direct": settings.gpu_direct, "backend": settings.nixl_backend}


def _available(store: PageStore, settings: TransportSettings, make: Callable[[str], T]) -> list[T]:
    if settings.name != "auto":
        return [make(settings.name)]
    if settings.gpu_direct and is_loopback(settings.host):
        raise ConfigError(
            "--gpu-direct is about NIXL, which --transport auto leaves out while pages stay on this machine: add "
            "--transport nixl, or --data-interface with the address of an interface"
        )
    found: list[T] = []
    with contextlib.ExitStack() as opened:
        for candidate in LOCAL_TRANSPORTS if is_loopback(settings.host) else TRANSPORTS:
            if candidate == "cuda-ipc" and store.device_pages is None:
                continue
            try:
                found.append(make(candidate))
            except ConfigError as error:
                log.info("transport %s is not available here: %s", candidate, error)
            else:
                opened.callback(found[-1].close)
        opened.pop_all()
    if not found:
        raise ConfigError("--transport auto finds no transport that works here")
    return found
