"""The addresses of the gateways with which a node registers."""

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, Self

from common.clock import Clock
from common.config.shared import Role
from common.discovery.announcement import GATEWAYS, TTL_S
from common.discovery.etcd import EtcdError, EtcdStore
from common.errors import ConfigError
from common.wire.address import host_and_port
from common.wire.messages import Invite

log = logging.getLogger(__name__)

#: Seconds between two looks into etcd or the file.
POLL_S = 2.0
#: Further gateways are ignored.
MAX_GATEWAYS = 64
MAX_FILE_BYTES = 65_536


class GatewayDirectory(Protocol):
    """Where a node learns the addresses of its gateways.

    Attributes:
        description: where the addresses come from, for logs.
        is_fixed: the addresses never change.
    """

    description: str
    is_fixed: bool

    def addresses(self) -> tuple[str, ...]:
        """Return ``host:port`` of each gateway's control socket; safe on any thread."""
        ...

    def invited(self, invite: Invite) -> None:
        """A gateway names this node."""
        ...


class _UninvitedGateways:
    """Gateways that come from the configuration, etcd or a file, not from invitations."""

    _is_said = False

    def invited(self, invite: Invite) -> None:
        if not self._is_said:
            self._is_said = True
            log.error(
                "the gateway at %r names this node with --%s, and is ignored: start the node with --gateway listed",
                invite.address,
                invite.role,
            )


class FixedGateways(_UninvitedGateways):
    """Gateways that the configuration names."""

    is_fixed = True

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.description = f"the gateway at {','.join(addresses)}"
        self._addresses = addresses

    def addresses(self) -> tuple[str, ...]:
        return self._addresses


class ListedGateways:
    """Gateways that name this node with ``--prefill`` or ``--decode``, each for a while after it has said so last.

    Args:
        role: with which this node was started.
        accept: raises ConfigError for an address to which this node must not connect.
    """

    is_fixed = False

    def __init__(self, role: Role, accept: Callable[[str], None], clock: Clock) -> None:
        self.description = "gateways that name this node with --prefill or --decode"
        self._role = role
        self._accept = accept
        self._clock = clock
        self._until: dict[str, float] = {}  # by address
        self._refused: set[str] = set()  # logged

    def addresses(self) -> tuple[str, ...]:
        now = self._clock.now()
        return tuple(address for address, until in list(self._until.items()) if until > now)

    def invited(self, invite: Invite) -> None:
        try:
            if invite.role != self._role:
                raise ConfigError(f"it names this {self._role} node with --{invite.role}")
            host_and_port(invite.address, "the address of a gateway")
            self._accept(invite.address)
        except ConfigError as error:
            if invite.address not in self._refused and len(self._refused) < MAX_GATEWAYS:
                self._refused.add(invite.address)
                log.error("ignoring the gateway at %r: %s", invite.address, error)
            return
        known = self.addresses()
        if invite.address in known or len(known) < MAX_GATEWAYS:
            self._until = {address: self._until[address] for address in known}
            self._until[invite.address] = self._clock.now() + TTL_S


class Unavailable(Exception):
    """A source of addresses cannot be read now."""


class WatchedGateways(_UninvitedGateways):
    """Gateways that a source names, which is asked on a thread. The last addresses stand while it cannot be read.

    Args:
        read: returns the addresses, or raises Unavailable.
        source: its name, for logs.
        accept: raises ConfigError for an address to which this node must not connect.
    """

    is_fixed = False

    def __init__(self, read: Callable[[], Iterable[str]], source: str, accept: Callable[[str], None]) -> None:
        self.description = f"the gateways that {source} names"
        self._read = read
        self._source = source
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

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._ask()
            self._stopped.wait(POLL_S)

    def _ask(self) -> None:
        try:
            found = tuple(self._read())
        except Unavailable as error:
            if not self._is_failing:
                log.warning("%s; the gateways known so far are kept", error)
            self._is_failing = True
            return
        if self._is_failing:
            log.info("%s can be read again", self._source)
        self._is_failing = False
        self._addresses = tuple(dict.fromkeys(filter(self._is_accepted, found)))[:MAX_GATEWAYS]

    def _is_accepted(self, address: str) -> bool:
        try:
            host_and_port(address, f"an address in {self._source}")
            self._accept(address)
        except ConfigError as error:
            if address not in self._refused and len(self._refused) < MAX_GATEWAYS:
                self._refused.add(address)
                log.error("ignoring a gateway that %s names: %s", self._source, error)
            return False
        return True


class EtcdGateways(WatchedGateways):
    """Gateways that are announced in etcd."""

    def __init__(self, store: EtcdStore, accept: Callable[[str], None]) -> None:
        def read() -> Iterable[str]:
            try:
                values = store.values(GATEWAYS)
            except EtcdError as error:
                raise Unavailable(f"etcd does not answer: {error}") from error
            return [value[:300].decode(errors="replace") for value in values]

        super().__init__(read, "etcd", accept)


class FileGateways(WatchedGateways):
    """Gateways that a file names, one in each line. A file that does not exist yet names none."""

    def __init__(self, path: Path, accept: Callable[[str], None]) -> None:
        def read() -> Iterable[str]:
            try:
                if path.is_fifo():  # to open it would wait for a writer, and hold up the end of the node
                    raise Unavailable(f"{path} cannot be read: it is a named pipe; name a regular file")
                with path.open("rb") as file:
                    text = file.read(MAX_FILE_BYTES).decode(errors="replace")
            except FileNotFoundError:
                return ()
            except OSError as error:
                raise Unavailable(f"{path} cannot be read: {error.strerror or error}") from error
            return filter(None, map(str.strip, text.splitlines()))

        super().__init__(read, str(path), accept)
