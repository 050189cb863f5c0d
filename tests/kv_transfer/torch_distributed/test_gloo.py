"""Gloo groups: how they form and dissolve, unknown peers, and processes that stop or die."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL, MemfdStore
from support.kv.raw_gloo_peer import RawGlooPeer, attach, offer, threads
from support.kv.raw_tcp_peer import KEY, NUM_PAGES, SIZE, RawTcpPeer
from support.kv.transport_ends import End, digests, join, ship
from support.waiting import until

from common.errors import ConfigError
from common.wire.messages import Connect, LayoutMessage
from kv_transfer.page_slices import PageSlice, SlicePair
from kv_transfer.transports.base import Attached
from kv_transfer.transports.tcp.protocol import AuthenticatedConnection
from kv_transfer.transports.torch_distributed import GroupReader, GroupWriter, rendezvous
from kv_transfer.transports.torch_distributed import backend as group_backend
from kv_transfer.transports.torch_distributed.backend import Group, HashStore, Pages, is_sound, open_group
from kv_transfer.transports.torch_distributed.rendezvous import (
    ENTRY_MAGIC,
    HEADER,
    MADE_MAGIC,
    MAX_ENTRIES,
    READER,
    WRITER,
    form,
)

# ---- forming a group ---------------------------------------------------------------------------------------------


def test_a_page_goes_through_a_group_and_closing_the_group_leaves_nothing(
    reader: GroupReader, writer: GroupWriter, store: MemfdStore
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    attach(writer, reader)
    reader.allow(PREFILL, 1, [3])
    assert isinstance(writer.store, MemfdStore)
    writer.store.fill(1, 42)
    ticket = writer.write(DECODE, [(1, 3)])
    assert until(writer.done) == [ticket]
    assert set(store.read(3)) == {42}
    assert (writer.counters()["bytes_by_gloo"], reader.counters()["bytes_by_gloo"]) == (SIZE, SIZE)
    assert writer.detach(DECODE) is True
    assert [(f.peer, f.epoch) for f in until(lambda: reader.poll(0.0))] == [(PREFILL, 1)]
    until(lambda: (writer.poll(), reader.poll(0.0), not threads("send-pages") + threads("receive-pages"))[-1])
    reader.poll(0.0)
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_slices_of_a_page_are_gathered_and_scattered(
    reader: GroupReader, writer: GroupWriter, store: MemfdStore
) -> None:
    """Tokens 0 and 1 of page 1 become tokens 2 and 3 of page 5. Keys and values have one run each."""
    attach(writer, reader)
    reader.allow(PREFILL, 1, [5])
    assert isinstance(writer.store, MemfdStore)
    writer.store.memory[SIZE : 2 * SIZE] = bytes(range(SIZE))
    front, back = PageSlice(0, 2, 0, LAYOUT.num_kv_heads), PageSlice(2, 2, 0, LAYOUT.num_kv_heads)
    ticket = writer.write(DECODE, [(1, 5)], SlicePair(LAYOUT, front, LAYOUT, back))
    assert until(writer.done) == [ticket]
    assert store.read(5) == bytes(16) + bytes(range(16)) + bytes(16) + bytes(range(32, 48))
    assert writer.counters()["bytes_by_gloo"] == SIZE // 2


def test_several_pairs_are_independent(reader: GroupReader, writer: GroupWriter, store: MemfdStore) -> None:
    """Two writers attach to one reader; the loss of one does not affect the other."""
    second = GroupWriter(MemfdStore(NUM_PAGES), "gloo", key=KEY)
    other = "q" * 32
    attach(writer, reader)
    endpoint = reader.offer(other, 2)
    second.attach(DECODE, Connect("decode-0", "model", 2, LayoutMessage.of(LAYOUT), NUM_PAGES, "gloo", endpoint))
    assert until(lambda: reader.poll(0.0) or second.poll()) == [Attached(DECODE, 2)]
    reader.allow(PREFILL, 1, [1])
    reader.allow(other, 2, [2])
    second.write(DECODE, [(0, 1)])  # granted to the first writer
    until(second.done)
    assert reader.counters()["refused_pages"] == 1
    second.close()
    assert [f.peer for f in until(lambda: reader.poll(0.0))] == [other]
    assert isinstance(writer.store, MemfdStore)
    writer.store.fill(0, 9)
    writer.write(DECODE, [(0, 1)])
    until(writer.done)
    assert set(store.read(1)) == {9}


def test_both_ends_move_pages_on_streams_of_their_own(
    reader: GroupReader, writer: GroupWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NCCL they would wait for the steps of the model that are queued on the default stream."""
    inside: set[int] = set()
    found: dict[str, bool] = {}

    @contextmanager
    def on_own_stream(_: Pages) -> Iterator[None]:
        inside.add(threading.get_ident())
        yield
        inside.remove(threading.get_ident())

    def noting(name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any) -> Any:
            found[name] = threading.get_ident() in inside and found.get(name, True)
            return move(*args)

        return moved

    monkeypatch.setattr(Pages, "on_own_stream", on_own_stream)
    for name in ("staging", "gather", "scatter"):
        monkeypatch.setattr(Pages, name, noting(name, getattr(Pages, name)))
    monkeypatch.setattr(Group, "exchange", noting("exchange", Group.exchange))
    attach(writer, reader)
    reader.allow(PREFILL, 1, [3])
    writer.write(DECODE, [(1, 3)])
    until(writer.done)
    assert found == {"exchange": True, "staging": True, "gather": True, "scatter": True}


def test_the_stream_of_copies_is_on_the_gpu_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving a stream of another GPU would take memory of the first one."""
    gpu, entered = torch.device("cuda", 1), []

    @contextmanager
    def enter(what: object) -> Iterator[None]:
        entered.append(what)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream", device))
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    rows = SimpleNamespace(is_cuda=True, device=gpu)
    store: Any = SimpleNamespace(device_pages=SimpleNamespace(view=lambda *_: rows), num_pages=8, layout=LAYOUT)
    with Pages(store, "nccl").on_own_stream():
        assert entered == [gpu, ("stream", gpu)]


def on_a_gpu() -> Any:
    """Pages of which only the place counts."""
    return SimpleNamespace(rows=SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1)))


@pytest.mark.parametrize("before", [None, "0", "1"])
@pytest.mark.parametrize("is_refused", [False, True])
def test_nccl_groups_of_pairs_have_no_watchdog_that_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, before: str | None, is_refused: bool
) -> None:
    """Groups in which ranks compute keep theirs."""
    name, seen = "TORCH_NCCL_BLOCKING_WAIT", []

    class NcclGroup:
        Options = SimpleNamespace

        def __init__(self, *_: Any) -> None:
            seen.append(os.environ.get(name))
            if is_refused:
                raise RuntimeError("no NCCL here")

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NcclGroup, raising=False)
    monkeypatch.setenv(name, before or "")  # has it restored in the end
    if before is None:
        del os.environ[name]
    with pytest.raises(ConnectionError, match="no NCCL here") if is_refused else nullcontext():
        open_group("nccl", HashStore(), rank=0, host="", pages=on_a_gpu())
    assert seen == ["1"]
    assert os.environ[name] == (before or "0")


def test_a_page_that_does_not_come_by_nccl_holds_up_no_other_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has another pool of streams for groups of high priority."""
    made = []

    class NcclGroup:
        Options = SimpleNamespace

        def __init__(self, _store: HashStore, _rank: int, _size: int, options: SimpleNamespace) -> None:
            made.append(options.is_high_priority_stream)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NcclGroup, raising=False)
    open_group("nccl", HashStore(), rank=0, host="", pages=on_a_gpu())
    assert made == [True]


def test_an_error_of_nccl_ends_the_wait_for_a_page_and_nothing_else() -> None:
    def fail() -> None:
        raise RuntimeError("NCCL error: remote process exited or there was a network error, NCCL version 2.27\nmore")

    group = Group(1, on_a_gpu(), SimpleNamespace(abort=fail))
    with pytest.raises(ConnectionError, match=r"^NCCL error: remote process exited .* NCCL version 2\.27$"):
        group.wait(SimpleNamespace(is_completed=lambda: True, wait=fail))
    group.close()


def test_page_frames_after_the_rendezvous_are_not_read_as_part_of_it(
    reader: GroupReader, writer: GroupWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is ready first, and sends a page as soon as the reader is ready."""
    run, send = rendezvous._Maker.run, rendezvous._EntryExchange._send

    def run_late(maker: Any) -> None:
        run(maker)
        time.sleep(0.1 if maker._arguments[2] == READER else 0)

    def send_slowly(exchange: Any, magic: bytes, *words: bytes) -> None:
        send(exchange, magic, *words)
        is_reader = exchange._connection.getsockname()[1] == reader._port
        time.sleep(0.2 if is_reader and magic == MADE_MAGIC else 0)

    monkeypatch.setattr(rendezvous._Maker, "run", run_late)
    monkeypatch.setattr(rendezvous._EntryExchange, "_send", send_slowly)
    attach(writer, reader)
    ticket = writer.write(DECODE, [(0, 0)])
    assert until(writer.done) == [ticket]


def test_an_offer_of_another_transport_is_refused(reader: GroupReader) -> None:
    """The handshakes of the transports have the same frames and differ only in their magic word."""
    raw_peer = RawTcpPeer(reader)
    raw_peer.hello(bytes.fromhex(offer(reader).endpoint.split(":")[2]))  # in the format of the tcp transport
    assert raw_peer.is_hung_up()
    assert reader._pending.dropped == {"garbage": 1}


def test_a_reader_gives_up_on_a_group_without_a_writer(reader: GroupReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "FORM_S", 0.3)
    monkeypatch.setattr(group_backend, "FORM_S", 0.3)
    assert len(RawGlooPeer(reader).handshake(offer(reader))) == 32
    [fenced] = until(lambda: reader.poll(0.0))
    assert fenced.reason.endswith("the group did not form within 0 s")
    until(lambda: not threads("form-gloo") + threads("receive-pages"))


def test_a_writer_reports_a_reader_that_stops_answering_while_the_group_forms(
    writer: GroupWriter, store: MemfdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "FORM_S", 0.3)
    monkeypatch.setattr(group_backend, "FORM_S", 0.3)
    silent = GroupReader(store, "gloo", key=KEY)
    silent._make_receive_thread = lambda authenticated, owner: Deaf(authenticated)  # type: ignore[assignment,return-value]
    writer.attach(DECODE, offer(silent))
    [attached] = until(lambda: silent.poll(0.0) or writer.poll())
    assert attached.problem.startswith("the gloo connection to decode node decode-0 at 127.0.0.1 port")
    assert attached.problem.endswith("could not be made: the group did not form within 0 s")
    assert writer.detach(DECODE)
    silent.close()
    until(lambda: not threads("form-gloo") + threads("send-pages"))


class Deaf:
    """A receive thread that does nothing."""

    def __init__(self, authenticated: AuthenticatedConnection) -> None:
        self.authenticated = authenticated

    def start(self) -> None: ...

    def shut(self) -> None:
        self.authenticated.connection.close()

    def collect(self) -> bool:
        return True

    def join(self) -> None: ...


def entry(
    authenticated: AuthenticatedConnection,
    key: bytes,
    value: bytes,
    *,
    magic: bytes = ENTRY_MAGIC,
    mac: bytes | None = None,
) -> bytes:
    header = HEADER.pack(magic, len(key), len(value))
    seal = authenticated.seal(b"rendezvous writer")
    return header + (seal.mac(header + key + value) if mac is None else mac) + key + value


def address(host: str, port: int = 1) -> bytes:
    """An address as Gloo publishes it: host name, socket address, numbers of pairs."""
    sockaddr = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(120)
    return struct.pack("N", 2) + b"vm" + struct.pack("N", len(sockaddr)) + sockaddr + struct.pack("nn", 0, 1)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (lambda authenticated: [b"GET / HTTP/1.1\r\nHost: a.node\r\n"], "has no place"),
        (lambda authenticated: [HEADER.pack(ENTRY_MAGIC, 3, 2**32 - 1) + bytes(40)], "has no place"),
        (lambda authenticated: [HEADER.pack(ENTRY_MAGIC, 2**16 - 1, 5) + bytes(40)], "has no place"),
        (lambda authenticated: [entry(authenticated, b"", b"x")], "has no place"),
        (lambda authenticated: [entry(authenticated, b"k", b"", magic=MADE_MAGIC)], "has no place"),
        (lambda authenticated: [entry(authenticated, b"0/0", address("127.0.0.1"), mac=bytes(16))], "did not send"),
        (lambda authenticated: [entry(authenticated, b"0/0", address("127.0.0.9"))], "not its own"),
        (lambda authenticated: [entry(authenticated, b"0/0", b"x" * 170)], "not its own"),
        (lambda authenticated: [entry(authenticated, b"0/1", address("127.0.0.1"))], "settled already"),
        (lambda authenticated: [entry(authenticated, b"a", address("127.0.0.1"))] * 2, "settled already"),
        (lambda authenticated: [entry(authenticated, b"\xff", address("127.0.0.1"))], "settled already"),
        (
            lambda authenticated: [
                entry(authenticated, b"%d" % i, address("127.0.0.1")) for i in range(MAX_ENTRIES + 1)
            ],
            "too many",
        ),
        (lambda authenticated: [entry(authenticated, b"", b"", magic=MADE_MAGIC)] * 2, "has no place"),
    ],
)
def test_an_invalid_frame_during_the_rendezvous_ends_it(
    reader: GroupReader, frames: Callable[[AuthenticatedConnection], list[bytes]], why: str
) -> None:
    gloo_peer = RawGlooPeer(reader)
    authenticated = gloo_peer.authenticated(offer(reader))
    until(lambda: reader.poll(0.0) or gloo_peer.connection.recv(1, socket.MSG_PEEK))  # the reader has answered
    gloo_peer.connection.sendall(b"".join(frames(authenticated)))
    [fenced] = until(lambda: reader.poll(0.0))
    assert (fenced.peer, fenced.epoch) == (PREFILL, 1)
    assert why in fenced.reason
    until(lambda: not threads("form-gloo") + threads("receive-pages"))


@settings(max_examples=examples(200), deadline=None)
@given(value=st.one_of(st.binary(max_size=400), st.builds(address, st.just("127.0.0.1")).map(lambda v: v[:-5])))
def test_random_bytes_are_no_valid_address(value: bytes) -> None:
    assert not is_sound("gloo", value, "127.0.0.1")


def test_only_an_address_on_the_peers_host_is_valid() -> None:
    assert is_sound("gloo", address("127.0.0.1"), "127.0.0.1")
    assert not is_sound("gloo", address("127.0.0.1"), "10.0.0.1")


class Liar(AuthenticatedConnection):
    """A connection without the secret of the offer."""

    def proof(self, label: bytes) -> bytes:
        return bytes(32)


def test_a_group_member_without_the_secret_is_detected(reader: GroupReader, store: MemfdStore) -> None:
    gloo_peer = RawGlooPeer(reader)
    authenticated = gloo_peer.authenticated(offer(reader))
    with pytest.raises(OSError):
        form(Liar(authenticated.connection, authenticated.terms, KEY), "gloo", WRITER, Pages(store, "gloo"))
    [fenced] = until(lambda: reader.poll(0.0))
    assert "another process answered within the group" in fenced.reason


def test_gloos_port_accepts_no_connection_once_the_group_has_formed(reader: GroupReader, writer: GroupWriter) -> None:
    """Each accepted connection would occupy a descriptor for the life of the pair."""

    def listening() -> set[int]:
        connections = psutil.Process().net_connections("tcp4")
        return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}

    before = listening()  # may include groups of earlier tests
    attach(writer, reader)
    ports = sorted(listening() - before)
    assert len(ports) == 2
    descriptors = len(os.listdir("/proc/self/fd"))
    for port in ports:
        with pytest.raises(TimeoutError), socket.create_connection(("127.0.0.1", port), timeout=0.2):
            pass
    assert len(os.listdir("/proc/self/fd")) <= descriptors


# ---- processes that stop or die ----------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["writer", "reader"])
def test_the_survivor_of_a_death_at_any_step_holds_nothing(start: Callable[..., End], victim: str) -> None:
    """The peer is killed this many milliseconds after the offer is used, in the handshake or later."""
    writer, reader = start("writer", "gloo"), start("reader", "gloo")
    for epoch, delay_ms in enumerate((0, 4, 12, 40), start=1):
        dying = start(victim, "gloo")
        ends = (dying, reader) if victim == "writer" else (writer, dying)
        ends[0].ask("attach", peer=DECODE, connect=ends[1].ask("offer", peer=PREFILL, epoch=2 * epoch))
        time.sleep(delay_ms / 1e3)
        dying.kill()
        until(lambda: writer.ask("detach", peer=DECODE))
        writer.ask("news"), reader.ask("news")
        join(writer, reader, "gloo", epoch=2 * epoch + 1)
        ship(writer, reader, [(epoch, 0, epoch)], epoch=2 * epoch + 1)
        assert writer.ask("detach", peer=DECODE) is True
        assert until(lambda: reader.ask("news"))[0][:2] == [PREFILL, 2 * epoch + 1]
    assert reader.ask("digest", pages=[1, 2, 3, 4]) == digests(1, 2, 3, 4)


def test_a_writer_detaches_from_a_stopped_reader(start: Callable[..., End]) -> None:
    writer, reader = start("writer", "gloo", TEST_STALL_S="600"), start("reader", "gloo")
    join(writer, reader, "gloo")
    reader.ask("allow", peer=PREFILL, epoch=1, pages=list(range(8)))
    reader.signal(signal.SIGSTOP)
    ticket = writer.ask("write", peer=DECODE, pages=[(i, i, i) for i in range(8)])
    time.sleep(0.2)
    assert writer.ask("finished") == []
    is_first = writer.ask("detach", peer=DECODE)
    until(lambda: writer.ask("detach", peer=DECODE))
    assert writer.ask("finished") == ([] if is_first else [ticket])
    assert writer.ask("counters")["bytes_by_gloo"] == 0
    reader.signal(signal.SIGCONT)
    assert until(lambda: reader.ask("news"))[0][:2] == [PREFILL, 1]
    join(writer, reader, "gloo", epoch=2)
    ship(writer, reader, [(50, 0, 7)], epoch=2)
    assert reader.ask("digest", pages=[7]) == digests(50)


def test_a_reader_that_is_stopped_too_long_breaks_only_its_own_pair(start: Callable[..., End]) -> None:
    """No other pair waits for it, and only its own page may take too long: at first, no page can."""
    writer, reader, other = (start(role, "gloo", TEST_STALL_S="600") for role in ("writer", "reader", "reader"))
    peer = "e" * 32
    join(writer, reader, "gloo")
    assert writer.ask("attach", peer=peer, connect=other.ask("offer", peer=PREFILL, epoch=1)) == ""
    assert until(lambda: writer.ask("news")) == [[peer, 1, "", "gloo"]]
    assert other.ask("chosen", peer=PREFILL, epoch=1, transport="gloo")
    reader.ask("allow", peer=PREFILL, epoch=1, pages=[0])
    other.ask("allow", peer=PREFILL, epoch=1, pages=[3, 4])
    reader.signal(signal.SIGSTOP)
    waiting = writer.ask("write", peer=DECODE, pages=[(1, 0, 0)])
    ticket = writer.ask("write", peer=peer, pages=[(2, 1, 3)])
    assert until(lambda: writer.ask("finished")) == [ticket]
    reader.signal(signal.SIGCONT)
    assert until(lambda: writer.ask("finished")) == [waiting]
    reader.signal(signal.SIGSTOP)
    writer.ask("set", TEST_STALL_S="0.5")
    writer.ask("write", peer=DECODE, pages=[(1, 0, 0)])
    [[lost, epoch, problem, _]] = until(lambda: writer.ask("news"))
    assert (lost, epoch) == (DECODE, 1)
    assert problem.startswith("the gloo connection to decode node decode-0 at 127.0.0.1 port")
    assert problem.endswith("broke: Timed out waiting 500ms for send operation to complete")
    writer.ask("set", TEST_STALL_S="600")
    ticket = writer.ask("write", peer=peer, pages=[(3, 1, 4)])
    until(lambda: ticket in writer.ask("finished"))
    assert other.ask("digest", pages=[3, 4]) == digests(2, 3)


# ---- refused configurations --------------------------------------------------------------------------------------


def test_nccl_without_a_gpu_is_refused_by_name(store: MemfdStore) -> None:
    for make in (GroupReader, GroupWriter):
        with pytest.raises(ConfigError, match="--transport nccl"):
            make(store, "nccl")


def test_an_address_of_another_machine_is_refused_with_the_flag_named(store: MemfdStore) -> None:
    with pytest.raises(ConfigError, match="--data-interface"):
        GroupReader(store, "gloo", host="192.0.2.1")


def test_torch_is_not_imported_for_other_transports() -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests'); from support.kv.kv_fakes import MemfdStore;"
        "from kv_transfer.transports.factory import TransportSettings, open_reader, open_writer;"
        "open_reader(MemfdStore(1), TransportSettings('auto')), open_writer(MemfdStore(1), TransportSettings('tcp'));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], timeout=60).returncode == 0


@pytest.mark.cuda
def test_slices_on_a_gpu_are_gathered_and_scattered_on_the_stream_of_copies() -> None:
    """Tokens 0 and 1 of page 1 become tokens 2 and 3 of page 5."""
    from common.engine.kv_pool import KVPool

    pool = KVPool(LAYOUT, NUM_PAGES, "cuda")
    pool.pages[1] = torch.arange(SIZE)
    pool.pages[1].cpu()  # waits until the device has done it, as for the end of a step
    front, back = PageSlice(0, 2, 0, LAYOUT.num_kv_heads), PageSlice(2, 2, 0, LAYOUT.num_kv_heads)
    pair, pages = SlicePair(LAYOUT, front, LAYOUT, back), Pages(pool, "nccl")
    with pages.on_own_stream():
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        staging = pages.staging()
        pages.scatter(5, [(to, length) for _, to, length in pair.runs], pages.gather(1, pair, staging))
    expected = bytes(16) + bytes(range(16)) + bytes(16) + bytes(range(32, 48))
    assert pool.pages[5].cpu().numpy().tobytes() == expected
    pool.close()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_pages_go_from_device_to_device() -> None:
    from common.engine.kv_pool import KVPool

    source, target = (KVPool(LAYOUT, NUM_PAGES, f"cuda:{i}") for i in range(2))
    writer, reader = GroupWriter(source, "nccl"), GroupReader(target, "nccl")
    connect = Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "nccl", reader.offer(PREFILL, 1))
    writer.attach(DECODE, connect)
    assert until(lambda: reader.poll(0.0) or writer.poll(), 60.0) == [Attached(DECODE, 1)]
    source.pages.random_()
    reader.allow(PREFILL, 1, [0, 3])
    tickets = [writer.write(DECODE, [(5, 3), (1, 0)]), writer.write(DECODE, [(2, 4)])]  # page 4 is not permitted
    done: list[int] = []
    until(lambda: done.extend(writer.done()) or len(done) == 2)
    assert sorted(done) == tickets
    reader.store.landed([0, 3])  # keeps the pages that have arrived
    expected = {3: source.pages[5], 0: source.pages[1]}
    for page in range(NUM_PAGES):
        ours = target.pages[page].cpu()
        assert torch.equal(ours, expected[page].cpu() if page in expected else torch.zeros_like(ours))
    assert writer.counters()["bytes_by_nccl"] == 2 * SIZE
    writer.close()
    reader.close()
