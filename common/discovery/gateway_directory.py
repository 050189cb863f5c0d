"""The addresses of the gateways with which a node registers."""

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from common.discovery.announcement import GATEWAYS
from common.discovery.etcd import EtcdError, EtcdStore
from common.errors import ConfigError
from common.wire.address import host_and_port

log = logging.getLogger(__name__)

#: How often etcd is asked.
POLL_S = 2.0
#: Further gateways are ignored.
MAX_GATEWAYS = 64


class GatewayDirectory(Protocol):
    """Attributes:
    description: where the addresses come from, for logs.
    is_fixed: the addresses never change.
    """

    description: str
    is_fixed: bool

    def addresses(self) -> tuple[str, ...]:
        """Return ``host:port`` of each gateway's control socket; safe on any thread."""
        ...


class FixedGateways:
    """Gateways that the configuration names."""

    is_fixed = True

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.description = f"the gateway at {','.join(addresses)}"
        self._addresses = addresses

    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class EtcdGateways:
    """Gateways that are announced in etcd, asked for on a thread.

    The last addresses stand while etcd is away.

    Args:
        accept: raises ConfigError for an address to which this node must not connect.
    """

    is_fixed = False

    def __init__(self, store: EtcdStore, accept: Callable[[str], None]) -> None:
        self.description = "the gateways that etcd names"
        self._store = store
        self._accept = accept
        self._addresses: tuple[str, ...] = ()
        self._refused: set[str] = set()  # logged
        self._is_failing = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateway directory", daemon=True)

    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._ask()
            self._stopped.wait(POLL_S)

    def _ask(self) -> None:
        try:
            values = self._store.values(GATEWAYS)
        except EtcdError as error:
            if not self._is_failing:
                log.warning("etcd does not answer; the gateways known so far are kept: %s", error)
            self._is_failing = True
            return
        if self._is_failing:
            log.info("etcd answers again")
        self._is_failing = False
        addresses = tuple(filter(self._is_accepted, (value[:300].decode(errors="replace") for value in values)))
        self._addresses = tuple(dict.fromkeys(addresses))[:MAX_GATEWAYS]

    def _is_accepted(self, address: str) -> bool:
        try:
            host_and_port(address, "an address in etcd")
            self._accept(address)
        except ConfigError as error:
            if address not in self._refused and len(self._refused) < MAX_GATEWAYS:
                self._refused.add(address)
                log.error("ignoring a gateway that etcd names: %s", error)
            return False
        return True
