"""CUDA IPC beyond the contract of all transports: what is refused, and what follows when the device fails.

The driver is a fake over host memory (``fake_libcuda.c``); everything else is as on a GPU. A process cannot open its
own memory, so the reader is another process.
"""

import ctypes
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kv.fake_cuda import DeviceStore, use_fake_driver
from support.kv.kv_fakes import DECODE, PREFILL, MemfdStore
from support.kv.shm_ends import open_descriptors
from support.kv.transport_ends import End, digests, join, ship
from support.kv.transport_process import LAYOUT, NUM_PAGES, page_content
from support.waiting import until

from common.config.node import NodeConfig
from common.errors import ConfigError
from common.wire.messages import Connect, LayoutMessage
from kv_transfer.transports.base import AttachError
from kv_transfer.transports.cuda_ipc import CudaIpcReader, CudaIpcWriter, driver
from kv_transfer.transports.cuda_ipc.driver import HANDLE_BYTES, UUID_BYTES
from kv_transfer.transports.cuda_ipc.protocol import NONCE_BYTES, PROBE_BYTES, SharedPool, echo_offset
from kv_transfer.transports.cuda_ipc.writer import joined
from kv_transfer.transports.factory import TransportSettings, open_reader, open_writer
from kv_transfer.transports.shm.protocol import HELLO

ATTACHED = ""


@pytest.fixture(autouse=True)
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", driver.LIBRARY)  # as it was, afterwards
    use_fake_driver()


@pytest.fixture
def fail() -> Iterator[Callable[[str], None]]:
    """Have the driver of this process fail at one call; at none after the test."""
    told = ctypes.CDLL(driver.LIBRARY).fake_cuda_fail
    yield lambda name: told(name.encode())
    told(b"")


@pytest.fixture
def writer() -> Iterator[CudaIpcWriter]:
    store = DeviceStore(NUM_PAGES, LAYOUT)
    writer = CudaIpcWriter(store)
    yield writer
    writer.close()
    store.close()


def offer(reader: End, epoch: int = 1, peer: str = PREFILL) -> Connect:
    connect = msgspec.json.decode(reader.ask("offer", peer=peer, epoch=epoch), type=Connect)
    return msgspec.structs.replace(connect, endpoint=json.loads(connect.endpoint)["cuda-ipc"])


def outcome(writer: CudaIpcWriter, connect: Connect) -> str:
    """Attach, and return the problem."""
    try:
        writer.attach(DECODE, connect)
    except AttachError as error:
        return str(error)
    return str(until(writer.poll)[0].problem)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("open_end", [open_reader, open_writer])
def test_a_pool_in_host_memory_is_refused(open_end: Callable[..., object]) -> None:
    store = MemfdStore(2)
    with pytest.raises(ConfigError, match="cuda-ipc moves pages between GPUs, and this pool is in host memory"):
        open_end(store, TransportSettings("cuda-ipc"))
    store.close()


def test_a_cpu_node_with_cuda_ipc_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="--transport cuda-ipc needs CUDA: leave out --device cpu"):
        NodeConfig(transport="cuda-ipc", device="cpu")
    assert NodeConfig(transport="cuda-ipc").transport == "cuda-ipc"


def test_a_machine_without_the_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DeviceStore(2)
    monkeypatch.setattr(driver, "LIBRARY", "libno-such-driver.so")
    for end in (CudaIpcReader, CudaIpcWriter):
        with pytest.raises(ConfigError, match=r"cuda-ipc needs NVIDIA's driver: libno-such-driver\.so"):
            end(store)
    store.close()


@pytest.mark.parametrize("call", ["cuMemGetAddressRange_v2", "cuIpcGetMemHandle", "cuMemAlloc_v2"])
def test_memory_that_cannot_be_exported_is_refused_with_the_setting_named(
    fail: Callable[[str], None], call: str
) -> None:
    store = DeviceStore(2)
    fail(call)
    with pytest.raises(ConfigError, match=rf"cannot export the GPU's memory \({call}: the fake.*expandable_segments"):
        CudaIpcReader(store)
    fail("")
    store.close()


def test_a_gpu_that_the_writer_does_not_see_is_refused_with_the_setting_named(
    start: Callable[..., End], writer: CudaIpcWriter
) -> None:
    reader = start("reader", "cuda-ipc", FAKE_CUDA_UUIDS="XY")
    assert "does not see the GPU of decode-0; check CUDA_VISIBLE_DEVICES" in outcome(writer, offer(reader))


def test_memory_that_cannot_be_opened_is_refused_and_the_next_offer_is_accepted(
    start: Callable[..., End], writer: CudaIpcWriter, fail: Callable[[str], None]
) -> None:
    reader = start("reader", "cuda-ipc")
    fail("cuIpcOpenMemHandle_v2")
    assert "the GPU memory of decode-0 cannot be opened: cuIpcOpenMemHandle_v2" in outcome(writer, offer(reader))
    fail("")
    assert outcome(writer, offer(reader, 2)) == ATTACHED


def test_memory_whose_size_is_unknown_is_closed_again(
    start: Callable[..., End], writer: CudaIpcWriter, fail: Callable[[str], None]
) -> None:
    reader = start("reader", "cuda-ipc")
    fail("cuMemGetAddressRange_v2")
    assert "of decode-0 cannot be opened: cuMemGetAddressRange_v2" in outcome(writer, offer(reader))
    assert num_opened() == 0


def pool_info_of(connect: Connect) -> tuple[bytes, bytes]:
    """Attach by hand, and return what the reader hands over: ``HELLO``, and what follows."""
    name, token = connect.endpoint.split(":")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        connection.connect(f"\0{name}")
        connection.send(bytes.fromhex(token))
        frame = connection.recv(4096)
    return frame[: HELLO.size], frame[HELLO.size :]


def changed(true: SharedPool, **fields: object) -> bytes:
    return replace(true, **fields).encode()  # type: ignore[arg-type]


CHANGES: list[tuple[Callable[[SharedPool], bytes], str]] = [
    (lambda true: true.encode()[:-1], "is not a pool of cuda-ipc: "),
    (lambda true: true.encode() + b"!", "is not a pool of cuda-ipc: "),
    (lambda true: b"", "is not a pool of cuda-ipc: 0 bytes"),
    (lambda true: changed(true, offset=true.offset + 101), "reaches beyond its GPU memory"),
    (lambda true: changed(true, offset=2**64 - 1), "reaches beyond its GPU memory"),
    (lambda true: changed(true, pool=b"\1" * HANDLE_BYTES), "cannot be opened"),
    (lambda true: changed(true, probe=b"\1" * HANDLE_BYTES), "cannot be opened"),
    (lambda true: changed(true, probe=true.pool), "are not those stored there"),
    (lambda true: changed(true, nonce=b"\1" * NONCE_BYTES), "are not those stored there"),
    (lambda true: changed(true, device=b"\1" * UUID_BYTES), "does not see the GPU"),
]


def test_a_damaged_hand_over_is_refused_with_an_explanation_and_nothing_stays_open(
    start: Callable[..., End], writer: CudaIpcWriter
) -> None:
    reader = start("reader", "cuda-ipc")
    hello, pool_info = pool_info_of(offer(reader))
    true = SharedPool.decode(pool_info)
    connect = offer(reader, 1)
    name = f"baton-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(1)
        forged = msgspec.structs.replace(connect, endpoint=f"{name}:{'0' * 64}")
        for change, sentence in [*CHANGES, (SharedPool.encode, ATTACHED)]:
            writer.attach(DECODE, forged)
            pending, _ = listener.accept()
            with pending:
                pending.send(hello + change(true))
                (news,) = until(writer.poll)
                assert sentence in news.problem if sentence else not news.problem, sentence
    writer.detach(DECODE)
    assert num_opened() == 0


def num_opened() -> int:
    """Mappings of other processes' fake device memory, beside this process's own pool."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:fake-device" in line for line in maps) - 1


def test_a_file_beside_the_pool_is_refused(start: Callable[..., End], writer: CudaIpcWriter) -> None:
    reader = start("reader", "cuda-ipc")
    hello, pool_info = pool_info_of(offer(reader))
    name = f"baton-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(1)
        writer.attach(DECODE, msgspec.structs.replace(offer(reader, 1), endpoint=f"{name}:{'0' * 64}"))
        pending, _ = listener.accept()
        with pending:
            socket.send_fds(pending, [hello + pool_info], [0])
            assert "handed over a file with its pool" in until(writer.poll)[0].problem


@given(st.binary(max_size=400))
def test_only_pool_info_of_the_right_length_is_decoded(pool_info: bytes) -> None:
    length = UUID_BYTES + 2 * HANDLE_BYTES + 8 + NONCE_BYTES + 4
    if len(pool_info) == length:
        assert SharedPool.decode(pool_info).encode() == pool_info
    else:
        with pytest.raises(ValueError, match=f"{len(pool_info)} bytes instead of {length}"):
            SharedPool.decode(pool_info)


@given(st.integers(0, 2**32 - 1))
def test_every_area_of_the_probe_memory_has_room_beside_the_nonce(area: int) -> None:
    assert NONCE_BYTES <= echo_offset(area) <= PROBE_BYTES - NONCE_BYTES
    assert echo_offset(area) != echo_offset(area + 1)


def test_writers_of_one_epoch_try_out_their_attachments_in_areas_of_their_own(start: Callable[..., End]) -> None:
    """As the ranks of one prefill node do."""
    reader = start("reader", "cuda-ipc")
    ranks = [f"{PREFILL}/{rank}" for rank in range(3)]
    pool_infos = [pool_info_of(offer(reader, peer=peer))[1] for peer in ranks]
    assert len({SharedPool.decode(pool_info).area for pool_info in pool_infos}) == 3


# ---- the device fails ---------------------------------------------------------------------------------------------


def wait(writer: CudaIpcWriter) -> None:
    assert select.select(writer.files(), [], [], 60)[0]


def test_a_failed_copy_breaks_the_pair_and_is_fenced(
    start: Callable[..., End], writer: CudaIpcWriter, fail: Callable[[str], None]
) -> None:
    reader = start("reader", "cuda-ipc")
    assert outcome(writer, offer(reader)) == ATTACHED
    assert reader.ask("chosen", peer=PREFILL, epoch=1, transport="cuda-ipc")
    fail("cuMemcpyAsync")
    writer.write(DECODE, [(0, 0)])
    [broken] = until(writer.poll)
    assert broken.problem.startswith("writing into the GPU memory of decode-0 failed: cuMemcpyAsync: the fake")
    assert writer.done() == []
    assert writer.detach(DECODE) is True
    assert until(lambda: reader.ask("news"))[0][:2] == [PREFILL, 1]


def test_copies_whose_end_is_unknown_are_never_declared_over(
    start: Callable[..., End], writer: CudaIpcWriter, fail: Callable[[str], None]
) -> None:
    """Only the death of the writer is a fence then, which ``test_death_of_the_writer_is_a_fence`` shows."""
    reader = start("reader", "cuda-ipc")
    assert outcome(writer, offer(reader)) == ATTACHED
    assert reader.ask("chosen", peer=PREFILL, epoch=1, transport="cuda-ipc")
    fail("cuEventSynchronize")
    writer.write(DECODE, [(0, 0)])
    [broken] = until(writer.poll)
    assert "cuEventSynchronize" in broken.problem
    fail("")
    assert writer.detach(DECODE) is False
    assert writer.detach(DECODE) is False
    assert writer.done() == []
    time.sleep(0.2)
    assert reader.ask("news") == []


# ---- copies --------------------------------------------------------------------------------------------------------


def test_pages_that_follow_each_other_at_both_ends_are_one_copy() -> None:
    assert list(joined([])) == []
    assert list(joined([(0, 100, 10), (10, 110, 5), (15, 120, 5), (20, 125, 1)])) == [(0, 100, 15), (15, 120, 6)]
    assert list(joined([(10, 100, 10), (0, 110, 10)])) == [(10, 100, 10), (0, 110, 10)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_joined_runs_copy_the_same_bytes(pages: list[tuple[int, int]]) -> None:
    def bytes_of(runs: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(source + i, target + i) for source, target, size in runs for i in range(size)]

    runs = [(source * 3, target * 3, 3) for source, target in pages]
    assert bytes_of(list(joined(runs))) == bytes_of(runs)


def test_a_write_of_more_pages_than_are_copied_at_once_arrives_whole(start: Callable[..., End]) -> None:
    """One page goes to three places, over and over, the last one at the end."""
    reader = start("reader", "cuda-ipc")
    store = DeviceStore(NUM_PAGES, LAYOUT)
    writer = CudaIpcWriter(store)
    assert outcome(writer, offer(reader)) == ATTACHED
    for page in range(NUM_PAGES):
        store.put(page, page_content(page))
    pages = [(0, page % 3) for page in range(100)] + [(page, page) for page in range(NUM_PAGES)]
    ticket = writer.write(DECODE, pages)
    wait(writer)
    assert until(writer.done) == [ticket]
    assert reader.ask("digest", pages=list(range(NUM_PAGES))) == digests(*range(NUM_PAGES))
    assert writer.counters() == {"bytes_by_cuda-ipc": float(len(pages) * LAYOUT.page_bytes)}
    writer.close()
    store.close()


# ---- the choice ----------------------------------------------------------------------------------------------------


def test_auto_prefers_cuda_ipc_between_gpus_of_one_host(start: Callable[..., End]) -> None:
    writer, reader = start("writer", "auto", TEST_DEVICE="1"), start("reader", "auto", TEST_DEVICE="1")
    join(writer, reader, "cuda-ipc")
    ship(writer, reader, [(1, 0, 1)])
    assert reader.ask("digest", pages=[1]) == digests(1)


def test_auto_takes_shared_memory_where_the_gpu_cannot_be_reached(start: Callable[..., End]) -> None:
    writer = start("writer", "auto", TEST_DEVICE="1")
    reader = start("reader", "auto", TEST_DEVICE="1", FAKE_CUDA_UUIDS="XY")
    join(writer, reader, "shm")


def test_pages_land_on_the_device_unless_they_arrive_there() -> None:
    """One reader gets pages by CUDA IPC from one peer and by shared memory from another."""
    store = DeviceStore(NUM_PAGES, LAYOUT)
    reader = open_reader(store, TransportSettings("auto", DECODE))
    for peer in (PREFILL, "q" * 32):
        reader.offer(peer, 1)
    assert reader.chosen(PREFILL, 1, "cuda-ipc")
    assert reader.chosen("q" * 32, 1, "shm")
    store.memory[: LAYOUT.page_bytes] = page_content(1)
    reader.landed(PREFILL, [0])
    assert (reader.store_of(PREFILL).is_in_place, store.read(0)) == (True, bytes(LAYOUT.page_bytes))
    reader.landed("q" * 32, [0])
    assert (reader.store_of("q" * 32).is_in_place, store.read(0)) == (False, page_content(1))
    reader.close()
    store.close()


def test_every_descriptor_and_the_probe_memory_are_given_back() -> None:
    store = DeviceStore(2, LAYOUT)
    num_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        CudaIpcReader(store, DECODE).close()
        CudaIpcWriter(store).close()
    assert len(os.listdir("/proc/self/fd")) <= num_before
    store.close()


def num_allocations() -> int:
    """Memories of the fake device that this process has allocated and not freed."""
    folder = "/proc/self/fd"
    return sum("memfd:fake-device" in os.path.realpath(f"{folder}/{name}") for name in os.listdir(folder))


@pytest.mark.parametrize("is_told", [True, False])
def test_the_probe_memory_is_given_back_unless_a_writer_may_have_it_open(
    start: Callable[..., End], is_told: bool
) -> None:
    """As when a decode node changes its role: writers are attached until they hear of it."""
    store, writer = DeviceStore(NUM_PAGES, LAYOUT), start("writer", "cuda-ipc")
    num_before, num_allocated = open_descriptors(), num_allocations()
    reader = CudaIpcReader(store, DECODE)
    endpoint = json.dumps({"cuda-ipc": reader.offer(PREFILL, 1)})
    connect = Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "cuda-ipc", endpoint)
    writer.ask("attach", peer=DECODE, connect=msgspec.json.encode(connect).decode())
    until(lambda: reader.poll(0.0) or writer.ask("news"))
    if is_told:
        assert reader.chosen(PREFILL, 1, "cuda-ipc")
    reader.close()
    assert num_allocations() == num_allocated + (not is_told)
    assert open_descriptors() <= num_before + (not is_told)
    store.close()
