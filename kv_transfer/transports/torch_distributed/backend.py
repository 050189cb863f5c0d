"""A process group of two for each pair and epoch: ``torch.distributed``'s Gloo or NCCL. The only module with torch.

Groups are built directly from the backend's class, over a store of the pair's own, so any number of them come and go
beside each other and nothing global is touched. The differences of the two backends are here: where tensors live, and
how a group is opened, waited for and cut short.

Gloo listens while a group forms, on the address that the pair already uses, believes everything that it is told, and
cannot cut a group short. So the peer's address is checked before Gloo sees it, the port is closed to all once the group
has formed (by a packet filter that accepts nothing; the port itself ends with the group), and a group is cut short by
shutting its connection down. NCCL's own sockets cannot be reached like that: ``NCCL_SOCKET_IFNAME`` says where it
listens.
"""

import contextlib
import ctypes
import os
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed
from torch.distributed import HashStore as HashStore  # type: ignore[attr-defined]

from common.errors import ConfigError
from kv_transfer.page_slices import SlicePair
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import RunCopier

STALL_S = 10.0  # a page that takes longer than this breaks the group
FORM_S = 10.0  # for a group to form
GRACE_S = 1.0  # a backend gives up so much later than we do, since its own errors say less
_POLL_S = 50e-6
_SO_ATTACH_FILTER = 26
_TAKE_NOTHING = struct.pack("HBBI", 6, 0, 0, 0)  # one BPF instruction: return 0 bytes
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"  # torch reads it when it makes a group of NCCL
_environment_lock = threading.Lock()
_PLACE = re.compile(r"^(\[[^\]]*\] )+")  # the file of Gloo in which an error occurred


class Pages:
    """A pool's bytes as the backend moves them.

    Args:
        store: for NCCL, with its pages on a CUDA device.

    Attributes:
        rows: uint8 ``[num_pages, page_bytes]``, on the CPU or the device.

    Raises:
        ConfigError: this pool is not where the backend can take pages from.
    """

    def __init__(self, store: PageStore, backend: str) -> None:
        if backend == "gloo":
            rows = torch.frombuffer(store.memory, dtype=torch.uint8)
        elif store.device_pages is None:
            raise ConfigError("--transport nccl moves pages between CUDA devices, and this pool is in host memory")
        else:
            rows = store.device_pages
        self.rows = rows.view(store.num_pages, store.layout.page_bytes)
        is_copier = backend != "gloo" and isinstance(store, RunCopier) and store.can_copy_runs
        self._copier = cast(RunCopier, store) if is_copier else None
        self._stream = torch.cuda.Stream(self.rows.device) if self.rows.is_cuda else None

    @contextlib.contextmanager
    def on_own_stream(self) -> Iterator[None]:
        """Have this thread copy, send and receive on the device of the pages, beside the steps of the model, which are
        on the default stream.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.rows.device), torch.cuda.stream(self._stream):
            yield

    def staging(self) -> torch.Tensor:
        """Memory for one page of ours, where our pages are."""
        return torch.empty_like(self.rows[0])

    def read(self, part: torch.Tensor) -> memoryview:
        """The bytes of a tensor of pages, for the CPU."""
        return part.cpu().numpy().data

    def gather(self, page: int, slices: SlicePair, staging: torch.Tensor) -> torch.Tensor:
        """What is to be sent of a page: a single run where it stands, or several put together in ``staging``."""
        row, at = self.rows[page], 0
        if len(slices.runs) == 1:
            [(at, _, length)] = slices.runs
            return row[at : at + length]
        if self._copier is not None:
            self._copier.gather((page,), tuple((source, length) for source, _, length in slices.runs), staging)
            return staging[: slices.num_bytes]
        for source, _, length in slices.runs:
            _copy(staging[at : at + length], row[source : source + length])
            at += length
        return staging[:at]

    def scatter(self, page: int, runs: Sequence[tuple[int, int]], staging: torch.Tensor) -> None:
        """Copy what has come into the pool, run after run; complete when it returns.

        Args:
            runs: (offset in the page, bytes).
        """
        row, at = self.rows[page], 0
        if self._copier is not None and len(runs) > 1:
            self._copier.scatter((page,), tuple(runs), staging)
        else:
            for offset, length in runs:
                _copy(row[offset : offset + length], staging[at : at + length])
                at += length
        if row.is_cuda:
            torch.cuda.current_stream(row.device).synchronize()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.is_cuda:
        target.copy_(source)
    else:  # runs in this thread alone, without the interpreter's lock
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Turn the errors of torch and its backends into a ConnectionError of one sentence."""
    try:
        yield
    except RuntimeError as error:
        line = _PLACE.sub("", str(error).split("\n")[0]).split(". ")[0]
        raise ConnectionError(line or type(error).__name__) from error


@dataclass(slots=True)
class Group:
    """One group of two that has formed. Sends and receives begin in order, and are over when ``wait`` returns."""

    peer: int  # its rank
    pages: Pages
    _group: Any
    _wires: list[socket.socket] = field(default_factory=list)  # our descriptors of Gloo's connection

    def send(self, tensor: torch.Tensor) -> Any:
        with named_errors():
            return self._group.send([tensor], self.peer, 0)

    def receive(self, tensor: torch.Tensor) -> Any:
        with named_errors():
            return self._group.recv([tensor], self.peer, 0)

    def wait(self, work: Any) -> None:
        """Wait for a send or a receive.

        Raises:
            ConnectionError: the other end is gone, or has not done its part within ``STALL_S``.
        """
        with named_errors():
            if self.pages.rows.is_cuda:
                _poll(work, self.pages.rows.device)
            elif not work.wait(timedelta(seconds=STALL_S)):
                raise ConnectionError("it was cut short")

    @named_errors()
    def exchange(self, ours: bytes, theirs: bytes) -> None:
        """Send these bytes and expect those, as many, rank 0 first.

        Raises:
            ConnectionError: other bytes came.
        """
        told = torch.frombuffer(bytearray(ours), dtype=torch.uint8).to(self.pages.rows.device)
        heard = torch.zeros_like(told)
        steps: list[Callable[[], Any]] = [lambda: self.send(told), lambda: self.receive(heard)]
        for step in steps if self.peer else reversed(steps):
            self.wait(step())
        if bytes(heard.cpu().tolist()) != theirs:
            raise ConnectionError("another process answered within the group")

    def abort(self) -> None:
        """Make what is under way fail, in whatever thread waits for it. Thread-safe and idempotent."""
        for wire in self._wires:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
        group = self._group
        if self.pages.rows.is_cuda and group is not None:
            with contextlib.suppress(RuntimeError):  # it took longer than torch expects
                group.abort()

    def close(self) -> None:
        """Dissolve the group, which touches no tensor afterwards. Called last, by the thread that used it."""
        self.abort()
        self._group = None
        for wire in self._wires:
            wire.close()


def _poll(work: Any, device: torch.device) -> None:
    until = time.monotonic() + STALL_S
    while not work.is_completed():
        if time.monotonic() > until:
            raise ConnectionError(f"a page took longer than {STALL_S:.0f} s")
        time.sleep(_POLL_S)
    work.wait()
    torch.cuda.current_stream(device).synchronize()


def check_available(backend: str) -> None:
    """Check that this torch has the backend.

    Raises:
        ConfigError: it does not.
    """
    is_there = torch.distributed.is_available() and hasattr(HashStore, "list_keys")
    has = {"gloo": torch.distributed.is_gloo_available, "nccl": torch.distributed.is_nccl_available}
    if not is_there or not has[backend]():
        raise ConfigError(f"--transport {backend} needs a torch that has it, which {torch.__version__} does not")


def open_group(backend: str, store: HashStore, *, rank: int, host: str, pages: Pages) -> Group:
    """Form the group; blocks for ``FORM_S + GRACE_S`` at most.

    Args:
        store: what is set here is to be set in the peer's, and the other way round.
        host: address of ours that the peer reaches.

    Raises:
        ConnectionError: it could not be formed.
    """
    with named_errors():
        return _open_gloo(store, rank, host, pages) if backend == "gloo" else _open_nccl(store, rank, pages)


def _open_gloo(store: HashStore, rank: int, host: str, pages: Pages) -> Group:
    options = torch.distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=FORM_S + GRACE_S)
    options._threads = 1
    options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    formed = torch.distributed.ProcessGroupGloo(store, rank, 2, options)
    published = b"".join(store.get(key) for key in store.list_keys())
    wires = []
    for wire in _sockets_of(published):
        if wire.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            _close_to_all(wire)
            wire.close()
        else:
            wires.append(wire)
    return Group(1 - rank, pages, formed, wires)


def _open_nccl(store: HashStore, rank: int, pages: Pages) -> Group:
    # torch gives each group one of 32 streams in turn. Those of high priority are a pool of their own: otherwise a page
    # that does not come would hold up other copies of this node that have got the same stream.
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=STALL_S)
    with _without_watchdog():
        return Group(1 - rank, pages, torch.distributed.ProcessGroupNCCL(store, rank, 2, options))


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Have torch make groups of NCCL without a watchdog, which would end the process for an error in one of them.

    ``wait`` raises the errors of such groups. Those in which ranks compute together keep their watchdogs.
    """
    with _environment_lock:
        # The variable is not removed again: other threads may read the environment, which additions can move.
        before = os.environ.get(_BLOCKING_WAIT, "0")
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            os.environ[_BLOCKING_WAIT] = before


def is_sound(backend: str, value: bytes, host: str) -> bool:
    """Whether this value of the peer's may be put into the store.

    Gloo would follow its lengths wherever they lead, and dial any address: it must be a host name, a socket address of
    the peer's host and at most two numbers.
    """
    if backend != "gloo":
        return True
    word = struct.calcsize("n")
    at = 0
    for _ in range(2):
        if len(value) < at + word:
            return False
        (size,) = struct.unpack_from("N", value, at)
        at += word + size
    rest = len(value) - at
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return 0 <= rest <= 2 * word and rest % word == 0 and socket.inet_pton(family, host) in value


def _sockets_of(published: bytes) -> list[socket.socket]:
    """Sockets of this process with one end at an address that stands in ``published``: the group's own."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:
            continue
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        one = socket.socket(fileno=descriptor)
        if any(packed in published for packed in _addresses(one)):
            found.append(one)
        else:
            one.close()
    return found


def _addresses(one: socket.socket) -> Sequence[bytes]:
    """Addresses of both ends, as the system writes them."""
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return ()
    packed = []
    for ask in (one.getsockname, one.getpeername):
        with contextlib.suppress(OSError):
            host, port = ask()[:2]
            head = struct.pack("=H", one.family) + struct.pack("!H", port)
            head += bytes(4) if one.family == socket.AF_INET6 else b""  # flow label
            packed.append(head + socket.inet_pton(one.family, host))
    return packed


def _close_to_all(listener: socket.socket) -> None:
    """Let nothing more reach this listener. Best effort: without it, strangers can use up our descriptors."""
    code = ctypes.create_string_buffer(_TAKE_NOTHING)
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))
