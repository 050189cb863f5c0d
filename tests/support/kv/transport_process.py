"""One end of a transport as a process that reads commands as JSON lines from its standard input.

    transport_process.py ROLE TRANSPORT [KEY]

ROLE is writer or reader, or sender or receiver for the layer above (``transfer_process``). Pages are filled and checked
by seed. The process imports neither torch nor zmq, so that it starts quickly.
"""

import hashlib
import json
import os
import random
import select
import sys
import time
from dataclasses import replace
from typing import Any, TextIO

import msgspec
from support.kv.fake_cuda import DeviceStore, use_fake_driver
from support.kv.kv_fakes import MemfdStore

from common.cache.page_layout import PageLayout
from common.wire.messages import Connect, LayoutMessage
from kv_transfer.page_mapping import PageMapping
from kv_transfer.receive import table as receive_table
from kv_transfer.transports import negotiation, pending_connections
from kv_transfer.transports.base import AttachError, ReaderTransport, WriterTransport
from kv_transfer.transports.factory import TransportSettings, open_reader, open_writer
from kv_transfer.transports.nixl import reader as nixl_reader
from kv_transfer.transports.nixl import writer as nixl_writer
from kv_transfer.transports.tcp import writer as tcp_writer

LAYOUT = PageLayout(num_layers=4, num_kv_heads=2, head_dim=256, page_size=16, dtype="float32")  # 256 KiB a page
NUM_PAGES = 16
GROUP_MODULES = {
    f"kv_transfer.transports.torch_distributed.{part}" for part in ("backend", "rendezvous", "reader", "writer")
}


def page_content(seed: int, layout: PageLayout = LAYOUT) -> bytes:
    return random.Random(seed).randbytes(layout.page_bytes)


def layout_here() -> PageLayout:
    """Return the page layout of this process; ``TEST_LAYOUT`` sets fields of it, as JSON."""
    return replace(LAYOUT, **json.loads(os.environ.get("TEST_LAYOUT", "{}")))


def make_store(transport: str, layout: PageLayout = LAYOUT, *, is_writer: bool = True) -> MemfdStore:
    """The pool of this process, on a GPU where the transport needs one. Without ``TEST_GPU`` the GPU is a fake.

    With ``TEST_DEVICE`` the pool is on a GPU whatever the transport. NCCL wants a GPU for each end.
    """
    if transport in ("nixl", "nccl") and "TEST_GPU" in os.environ:
        from support.kv.tensor_store import TensorStore

        return TensorStore(NUM_PAGES, layout, device="cuda:0" if is_writer or transport == "nixl" else "cuda:1")
    if transport == "cuda-ipc" or "TEST_DEVICE" in os.environ:
        if "TEST_GPU" not in os.environ:
            use_fake_driver()
        return DeviceStore(NUM_PAGES, layout)
    return MemfdStore(NUM_PAGES, layout)


class WriterEnd:
    def __init__(self, settings: TransportSettings) -> None:
        self.store = make_store(settings.name, layout_here())
        self.transport: WriterTransport = open_writer(self.store, settings)
        self.news: list[Any] = []
        self.finished: list[int] = []
        self.fits: dict[str, PageMapping] = {}

    def turn(self) -> None:
        self.news += [[a.peer, a.epoch, a.problem, a.transport] for a in self.transport.poll()]
        self.finished += self.transport.done()

    def do_attach(self, peer: str, connect: str) -> str:
        offer = msgspec.json.decode(connect, type=Connect)
        self.fits[peer] = PageMapping(self.store.layout, offer.layout.layout())
        try:
            self.transport.attach(peer, offer)
        except AttachError as error:
            return str(error)
        return ""

    def do_write(self, peer: str, pages: list[tuple[int, int, int]], slices: int = 0) -> int:
        """Write pages given as (seed, own page, peer's page); ``slices`` selects the slice pair."""
        for seed, source, _ in pages:
            self.store.put(source, page_content(seed, self.store.layout))
        moved = [(source, target) for _, source, target in pages]
        return self.transport.write(peer, moved, self.fits[peer].slice_pairs[slices])

    def do_detach(self, peer: str) -> bool:
        return self.transport.detach(peer)

    def do_finished(self) -> list[int]:
        finished, self.finished = self.finished, []
        return finished


class ReaderEnd:
    def __init__(self, settings: TransportSettings) -> None:
        self.store = make_store(settings.name, layout_here(), is_writer=False)
        self.transport: ReaderTransport = open_reader(self.store, settings)
        self.news: list[Any] = []

    def turn(self) -> None:
        self.news += [[f.peer, f.epoch, f.reason] for f in self.transport.poll(time.monotonic())]

    def do_offer(self, peer: str, epoch: int) -> str:
        endpoint = self.transport.offer(peer, epoch)
        name = self.transport.name
        connect = Connect("decode-0", "model", epoch, LayoutMessage.of(self.store.layout), NUM_PAGES, name, endpoint)
        return msgspec.json.encode(connect).decode()

    def do_chosen(self, peer: str, epoch: int, transport: str) -> bool:
        return self.transport.chosen(peer, epoch, transport)

    def do_allow(self, peer: str, epoch: int, pages: list[int]) -> None:
        self.transport.allow(peer, epoch, pages)

    def do_forbid(self, pages: list[int]) -> None:
        self.transport.forbid(pages)

    def do_withdraw(self, peer: str) -> None:
        self.transport.withdraw(peer)

    def do_fill(self, pages: list[tuple[int, int]]) -> None:
        """Fill pages given as (seed, page)."""
        for seed, page in pages:
            self.store.put(page, page_content(seed, self.store.layout))

    def do_digest(self, pages: list[int]) -> list[str]:
        return [hashlib.sha256(self.store.read(page)).hexdigest() for page in pages]


def set_timeouts() -> None:
    """Set the timeouts of transports from environment variables.

    ``TEST_PATIENCE_S`` sets all of them, ``TEST_ATTACH_TIMEOUT_S`` and ``TEST_STALL_S`` one each. ``TEST_HOLD_S`` is
    the time for which NIXL's writer may hold the loop to begin writes, and ``TEST_RECLAIM_S`` that after which pages
    are taken back.
    """
    receive_table.RECLAIM_S = float(os.environ.get("TEST_RECLAIM_S", receive_table.RECLAIM_S))
    nixl_writer.HOLD_S = float(os.environ.get("TEST_HOLD_S", nixl_writer.HOLD_S))
    patience_s = os.environ.get("TEST_PATIENCE_S")
    attach_s = os.environ.get("TEST_ATTACH_TIMEOUT_S", patience_s)
    if attach_s is not None:
        tcp_writer.ATTACH_TIMEOUT_S = nixl_writer.ATTACH_TIMEOUT_S = float(attach_s)
    if patience_s is not None:
        negotiation.PATIENCE_S = pending_connections.PATIENCE_S = nixl_reader.OFFER_S = float(patience_s)
    for name, value_s in (("STALL_S", os.environ.get("TEST_STALL_S", patience_s)), ("FORM_S", patience_s)):
        for module in GROUP_MODULES & sys.modules.keys():
            if value_s is not None and hasattr(sys.modules[module], name):
                setattr(sys.modules[module], name, float(value_s))


def _set_host() -> None:
    """With ``TEST_FAR`` set, writers appear to be on another host."""
    if os.environ.get("TEST_FAR"):
        nixl_reader.host_id = lambda: "elsewhere"
        nixl_reader.ShmReader.offer = lambda *_: "no address"  # type: ignore[method-assign]


def _end(role: str, settings: TransportSettings) -> Any:
    if role == "writer":
        return WriterEnd(settings)
    if role == "reader":
        return ReaderEnd(settings)
    import support.kv.transfer_process as transfer_process

    return transfer_process.SenderEnd(settings) if role == "sender" else transfer_process.ReceiverEnd(settings)


def _reply(answers: TextIO, answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    role, name, key = sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else ""
    incarnation = os.environ.get("TEST_INCARNATION", ("p" if role == "writer" else "d") * 32)
    host = os.environ.get("TEST_HOST", "127.0.0.1")
    _set_host()
    is_direct = name == "nixl" and "TEST_GPU" in os.environ
    end = _end(role, TransportSettings(name, incarnation, host, key.encode(), gpu_direct=is_direct))
    set_timeouts()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX and others log to the standard output
    _reply(answers, os.getpid())
    pending = b""
    while True:
        ready, _, _ = select.select([0, *end.transport.files()], [], [], 0.02)
        end.turn()
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            what = command.pop("do")
            answer: Any = None
            if what == "news":
                answer, end.news = end.news, []
            elif what == "counters":
                answer = end.transport.counters()
            elif what == "set":  # other timeouts from here on
                os.environ.update(command)
                set_timeouts()
            elif what == "descriptors":
                answer = len(os.listdir("/proc/self/fd"))
            elif what == "close":
                end.transport.close()
                end.store.close()
                _reply(answers, "closed")
                return
            else:
                answer = getattr(end, f"do_{what}")(**command)
            _reply(answers, answer)


if __name__ == "__main__":
    main()
