"""NIXL transfers between device pools without host staging.

Without a GPU, a second host allocation stands for device memory. NIXL is told that it is host memory; everything else
is unchanged.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL, MemfdStore
from support.waiting import until

from common.config.node import NodeConfig
from common.engine.kv_pool import KVPool
from common.errors import ConfigError
from common.wire.messages import Connect, LayoutMessage
from kv_transfer.page_slices import PageSlice, SlicePair
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import Attached
from kv_transfer.transports.factory import TransportSettings, open_reader, open_writer
from kv_transfer.transports.nixl import agent as nixl
from kv_transfer.transports.nixl.handshake import Handshake
from kv_transfer.transports.nixl.reader import NixlReader
from kv_transfer.transports.nixl.writer import NixlWriter

NUM_PAGES = 4
SIZE = LAYOUT.page_bytes


class DeviceStore(MemfdStore):
    """A page store whose pool is separate from ``memory``, as on a device."""

    is_mapped = is_in_place = False

    def __init__(self) -> None:
        super().__init__(NUM_PAGES)
        self.device_pages = torch.zeros(NUM_PAGES, SIZE, dtype=torch.uint8)
        self.num_exported = 0

    def export_page(self, page: int, into: memoryview) -> None:
        self.num_exported += 1
        into[:] = bytes(self.device_pages[page].tolist())

    def landed(self, pages: Any) -> None:
        super().landed(pages)
        for page in pages:
            self.device_pages[page] = torch.frombuffer(bytearray(self.read(page)), dtype=torch.uint8)


@pytest.fixture
def is_like_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "DEVICE_KIND", "DRAM")


@pytest.fixture
def pair(is_like_host_memory: None) -> Iterator[Callable[..., tuple[NixlWriter, NixlReader]]]:
    """Attach a writer and a reader in this process, and copy pages between them."""
    opened: list[Any] = []

    def make(ours: PageStore, theirs: PageStore, *, directs: tuple[bool, bool]) -> tuple[NixlWriter, NixlReader]:
        writer, reader = NixlWriter(ours, is_direct=directs[0]), NixlReader(theirs, is_direct=directs[1])
        opened.extend((writer, reader))
        attach(writer, reader, LAYOUT)
        return writer, reader

    yield make
    for transport in opened:
        transport.close()


def attach(writer: NixlWriter, reader: NixlReader, layout: Any) -> None:
    offer = reader.offer(PREFILL, 1)
    writer.attach(DECODE, Connect("decode-0", "model", 1, LayoutMessage.of(layout), NUM_PAGES, "nixl", offer))
    assert until(lambda: reader.poll(time.monotonic()) or writer.poll()) == [Attached(DECODE, 1)]


def write(
    writer: NixlWriter, reader: NixlReader, pages: list[tuple[int, int]], slices: SlicePair | None = None
) -> None:
    targets = [target for _, target in pages]
    reader.allow(PREFILL, 1, targets)
    ticket = writer.write(DECODE, pages, slices)
    assert until(writer.done) == [ticket]
    reader.store.landed(targets)


@pytest.mark.parametrize("directs", [(True, True), (True, False), (False, True)], ids=str)
def test_pages_arrive_if_either_pool_or_both_are_direct(
    pair: Callable[..., tuple[NixlWriter, NixlReader]], directs: tuple[bool, bool]
) -> None:
    ours, theirs = DeviceStore(), DeviceStore()
    ours.device_pages[:] = torch.arange(NUM_PAGES * SIZE).view(NUM_PAGES, SIZE) % 251
    writer, reader = pair(ours, theirs, directs=directs)
    write(writer, reader, [(1, 3), (2, 0)])
    expected = torch.zeros_like(theirs.device_pages)
    expected[3], expected[0] = ours.device_pages[1], ours.device_pages[2]
    assert torch.equal(theirs.device_pages, expected)
    assert (ours.num_exported, theirs.num_landed) == (0 if directs[0] else 2, 0 if directs[1] else 2)
    assert any(theirs.memory[:]) is not directs[1], "host memory was used by a direct pool, or not used by another"
    assert reader.store.is_in_place is directs[1]


def test_threads_that_call_nixl_enter_the_context_of_the_gpu_first(
    pair: Callable[..., tuple[NixlWriter, NixlReader]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, list[str]] = {}

    def note(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def noted(self: Any, *arguments: Any) -> Any:
            calls.setdefault(threading.current_thread().name, []).append(name)
            return method(self, *arguments)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in ((nixl.ProbeMemory, "enter_context"), (nixl.Agent, "progress"), (Handshake, "_load")):
        note(owner, name)
    pair(DeviceStore(), DeviceStore(), directs=(True, True))
    assert calls["nixl-send"][:2] == ["enter_context", "_load"]
    assert calls["nixl-receive"][:2] == ["enter_context", "progress"]


def test_a_slice_of_a_page_goes_directly(pair: Callable[..., tuple[NixlWriter, NixlReader]]) -> None:
    """The first two tokens of a page become the last two tokens of another page."""
    ours, theirs = DeviceStore(), DeviceStore()
    ours.device_pages[2] = torch.arange(SIZE)
    writer, reader = pair(ours, theirs, directs=(True, True))
    front, back = PageSlice(0, 2, 0, LAYOUT.num_kv_heads), PageSlice(2, 2, 0, LAYOUT.num_kv_heads)
    write(writer, reader, [(2, 1)], SlicePair(LAYOUT, front, LAYOUT, back))
    half = SIZE // 4  # keys and values of two of the four tokens
    page = theirs.device_pages[1].view(2, 2, half)
    assert torch.equal(page[:, 1], torch.arange(SIZE).view(2, 2, half)[:, 0])
    assert not page[:, 0].any()
    assert not theirs.device_pages[[0, 2, 3]].any()


@pytest.mark.parametrize("open_end", [open_reader, open_writer])
def test_gpu_direct_with_a_pool_in_host_memory_is_refused(open_end: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="--gpu-direct moves pages between GPUs, and this pool is in host memory"):
        open_end(MemfdStore(2), TransportSettings("nixl", gpu_direct=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("end", [NixlReader, NixlWriter])
def test_memory_that_nixl_cannot_register_is_refused_with_the_flag_named(end: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot register the GPU's memory \(--gpu-direct\)"):
        end(DeviceStore(), is_direct=True)


@pytest.mark.parametrize("words", [{"transport": "tcp"}, {"transport": "nixl", "device": "cpu"}], ids=str)
def test_gpu_direct_is_refused_where_it_has_no_effect(words: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--gpu-direct needs --transport nixl or auto, and CUDA"):
        NodeConfig(gpu_direct=True, **words)  # type: ignore[arg-type]
    assert NodeConfig(gpu_direct=True, transport="nixl").gpu_direct is True


@pytest.mark.parametrize("open_end", [open_reader, open_writer])
def test_gpu_direct_with_auto_is_refused_while_pages_stay_on_this_machine(open_end: Callable[..., Any]) -> None:
    assert NodeConfig(gpu_direct=True, transport="auto").gpu_direct is True
    with pytest.raises(ConfigError, match="--gpu-direct is about NIXL, which --transport auto leaves out"):
        open_end(DeviceStore(), TransportSettings("auto", gpu_direct=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_moves_pages_directly_over_nixl_between_machines(is_like_host_memory: None) -> None:
    source, target = DeviceStore(), DeviceStore()
    settings = TransportSettings("auto", host="0.0.0.0", gpu_direct=True)
    writer, reader = open_writer(source, settings), open_reader(target, settings)
    connect = Connect("decode-0", "m", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "nixl", reader.offer(PREFILL, 1))
    offered = json.loads(connect.endpoint)
    assert set(offered) == {"shm", "nixl", "tcp"}
    writer.attach(DECODE, msgspec.structs.replace(connect, endpoint=json.dumps({"nixl": offered["nixl"]})))
    until(lambda: reader.poll(time.monotonic()) or writer.poll())
    assert reader.chosen(PREFILL, 1, "nixl")
    source.device_pages[2] = 7
    reader.allow(PREFILL, 1, [3])
    writer.write(DECODE, [(2, 3)])
    until(writer.done)
    assert target.device_pages[3].eq(7).all()
    assert not any(target.memory[:])
    writer.close()
    reader.close()


@pytest.mark.cuda
def test_pages_go_from_gpu_to_gpu() -> None:
    last = torch.cuda.device_count() - 1  # the first GPU again if there is only one
    ours, theirs = (KVPool(LAYOUT, NUM_PAGES, f"cuda:{device}") for device in (0, last))
    ours.pages.random_()
    torch.cuda.synchronize()
    writer, reader = NixlWriter(ours, is_direct=True), NixlReader(theirs, is_direct=True)
    attach(writer, reader, LAYOUT)
    write(writer, reader, [(1, 3), (2, 0)])
    expected = torch.zeros_like(theirs.pages, device="cpu")
    expected[3], expected[0] = ours.pages[1].cpu(), ours.pages[2].cpu()
    assert torch.equal(theirs.pages.cpu(), expected)
    writer.close()
    reader.close()
