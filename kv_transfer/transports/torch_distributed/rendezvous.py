"""How a group of two forms over a connection on which both ends have authenticated themselves.

Each end has a store of its own. Entries that its backend sets there are sent to the other end, checked and set there
too, so that the backends find each other without a store that strangers could reach. Then both ends prove over the
group itself that no stranger took a place in it. Frames, both ways, until each end has sent MADE:

    ENTRY header + mac, key, value     at most ``MAX_ENTRIES``
    MADE header + mac                  the group works, seen from here
"""

import atexit
import hmac
import select
import struct
import threading
import time
from datetime import timedelta

from kv_transfer.transports.tcp.protocol import MAC_BYTES, AuthenticatedConnection
from kv_transfer.transports.torch_distributed.backend import (
    FORM_S,
    GRACE_S,
    Group,
    HashStore,
    Pages,
    is_sound,
    open_group,
)

WRITER, READER = 0, 1  # ranks
MAX_ENTRIES, MAX_KEY_BYTES, MAX_VALUE_BYTES = 16, 256, 4_096
HEADER = struct.Struct("<4sHI")  # magic, bytes of the key, bytes of the value
ENTRY_MAGIC, MADE_MAGIC = b"entr", b"made"
EXIT_S = 2.0
NO_ADDRESS = struct.pack("NN", 0, 0) + b"?"  # Gloo refuses it, and so waits no longer
_PAUSE_MS = 1
_ROLES = (b"writer", b"reader")


def form(authenticated: AuthenticatedConnection, backend: str, rank: int, pages: Pages) -> Group:
    """Form the group; blocks for at most ``FORM_S``. The connection is left at the byte after the peer's MADE.

    Raises:
        OSError: the peer left, did not answer in time, or sent something that cannot be meant.
    """
    store = HashStore()
    store.set_timeout(timedelta(seconds=FORM_S + GRACE_S))
    maker = _Maker(store, authenticated, backend, rank, pages)
    maker.start()
    try:
        _EntryExchange(store, authenticated, backend, rank).until_made(maker)
    except BaseException:
        maker.abandon()
        raise
    finally:
        authenticated.connection.setblocking(True)
    assert maker.group is not None
    return maker.group


class _Maker(threading.Thread):
    """Lets the backend form the group, which blocks, and proves our identity to the other end over it."""

    def __init__(
        self, store: HashStore, authenticated: AuthenticatedConnection, backend: str, rank: int, pages: Pages
    ) -> None:
        super().__init__(name=f"form-{backend}", daemon=True)
        self.group: Group | None = None
        self.problem = ""
        self._arguments = (backend, store, rank, authenticated.connection.getsockname()[0], pages)
        self._proofs = [authenticated.proof(b"group " + _ROLES[i]) for i in (rank, 1 - rank)]
        self._lock = threading.Lock()
        self._is_abandoned = False

    def run(self) -> None:
        backend, store, rank, host, pages = self._arguments
        group = None
        try:
            group = open_group(backend, store, rank=rank, host=host, pages=pages)
            with pages.on_own_stream():
                group.exchange(*self._proofs)
        except OSError as error:
            self.problem = str(error)
        with self._lock:
            if group is not None and not self.problem and not self._is_abandoned:
                self.group = group
                return
        if group is not None:
            group.close()

    @classmethod
    def wait_for_all(cls) -> None:
        """Wait for every thread before the interpreter ends: a thread that is killed within the backend aborts the
        process.
        """
        until = time.monotonic() + EXIT_S
        for maker in [thread for thread in threading.enumerate() if isinstance(thread, cls)]:
            maker.join(max(0.0, until - time.monotonic()))

    def abandon(self) -> None:
        """The group is not wanted any more. Ends soon if the peer's address is still waited for."""
        with self._lock:
            self._is_abandoned = True
            group, self.group = self.group, None
        backend, store, rank = self._arguments[:3]
        for key in store.list_keys() if backend == "gloo" else ():
            other = key.removesuffix(str(rank)) + str(1 - rank)
            if key.endswith(str(rank)) and not store.check([other]):
                store.set(other, NO_ADDRESS)  # type: ignore[arg-type]  # bytes are what it keeps
        if group is not None:
            group.close()


atexit.register(_Maker.wait_for_all)


class _EntryExchange:
    """Exchanges the entries of both stores over the connection while the group forms."""

    def __init__(self, store: HashStore, authenticated: AuthenticatedConnection, backend: str, rank: int) -> None:
        self._connection = authenticated.connection
        self._host: str = authenticated.connection.getpeername()[0]
        self._store = store
        self._backend = backend
        seals = [authenticated.seal(b"rendezvous " + role) for role in _ROLES]
        self._our_seal, self._their_seal = seals[rank], seals[1 - rank]
        self._readable = select.poll()
        self._readable.register(self._connection, select.POLLIN)
        self._until = time.monotonic() + FORM_S
        self._sent: dict[str, None] = {}
        self._received: dict[str, None] = {}
        self._is_made_there = False

    def until_made(self, maker: _Maker) -> None:
        is_made_here = False
        while True:
            if not is_made_here:
                is_made_here = self._send_entries(maker)
            if is_made_here and self._is_made_there:
                return  # the next bytes belong to the page frames
            if self._readable.poll(_PAUSE_MS):
                self._receive()
            elif self._until <= time.monotonic():
                raise ConnectionError(f"the group did not form within {FORM_S:.0f} s")

    def _send_entries(self, maker: _Maker) -> bool:
        """Send what our backend has set, and MADE when it has made the group; return whether it has."""
        is_over = not maker.is_alive()
        for key in self._store.list_keys():
            if key not in self._sent and key not in self._received:
                self._sent[key] = None
                self._send(ENTRY_MAGIC, key.encode(), self._store.get(key))
        if is_over and maker.problem:
            raise ConnectionError(maker.problem)
        if is_over:
            self._send(MADE_MAGIC)
        return is_over

    def _send(self, magic: bytes, key: bytes = b"", value: bytes = b"") -> None:
        header = HEADER.pack(magic, len(key), len(value))
        self._connection.settimeout(max(self._until - time.monotonic(), 1e-3))
        self._connection.sendall(header + self._our_seal.mac(header + key + value) + key + value)

    def _receive(self) -> None:
        """Receive one frame.

        Raises:
            OSError: it is not a frame that may come now.
        """
        header = self._exactly(HEADER.size)
        magic, key_bytes, value_bytes = HEADER.unpack(header)
        is_entry = magic == ENTRY_MAGIC and 0 < key_bytes <= MAX_KEY_BYTES and value_bytes <= MAX_VALUE_BYTES
        is_made = magic == MADE_MAGIC and not key_bytes and not value_bytes
        if self._is_made_there or not (is_entry or is_made):
            raise ConnectionError("received a frame that has no place while a group forms")
        mac = self._exactly(MAC_BYTES)
        key, value = self._exactly(key_bytes), self._exactly(value_bytes)
        if not hmac.compare_digest(self._their_seal.mac(header + key + value), mac):
            raise ConnectionError("received a frame that the peer did not send")
        if is_made:
            self._is_made_there = True
            return
        name = key.decode("ascii", "strict") if key.isascii() else ""
        if not name or name in self._sent or name in self._received or len(self._received) >= MAX_ENTRIES:
            raise ConnectionError("it sent an entry that is settled already, or too many")
        if not is_sound(self._backend, value, self._host):
            raise ConnectionError("it gave an address that is not its own")
        self._received[name] = None
        self._store.set(name, value)  # type: ignore[arg-type]  # bytes are what it keeps

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._connection.settimeout(max(self._until - time.monotonic(), 1e-3))
            more = self._connection.recv(size - len(data))
            if not more:
                raise ConnectionError("it closed the connection while the group formed")
            data += more
        return data
