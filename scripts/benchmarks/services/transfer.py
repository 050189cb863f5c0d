"""KV pages between two processes: GB/s and CPU time of every transport, compared with memcpy and the bare backend.

This process writes and another one receives. Each measurement of a transport is taken between two of its baselines in
the same run, over the same bytes: ``memcpy`` (one thread), ``socket`` (one plain TCP connection, ``sendmsg`` to
``recv_into``), ``bare nixl`` (the same prepared descriptors, posted at once, polled without pause), ``bare gloo`` (one
send of all bytes). Ratios are medians over the repetitions.
"""

import argparse
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from common.cache.page_layout import PageLayout
from common.engine.kv_pool import KVPool
from common.errors import ConfigError
from common.wire.mailbox import Mailbox
from common.wire.messages import Connect, FromDecode, FromPrefill, Grant, LayoutMessage, PagesWritten
from common.wire.process_id import new_incarnation
from kv_transfer.checksums import Checksums
from kv_transfer.transports.factory import TransportSettings, open_reader, open_writer
from kv_transfer.transports.nixl.writer import HOLD_S
from kv_transfer.transports.tcp.protocol import tune
from scripts.benchmarks.harness.options import TRANSPORTS, comma_separated
from scripts.benchmarks.services import gloo_baseline

LAYOUTS = {"qwen3-0.6b": PageLayout(28, 8, 128, 16, "bfloat16"), "llama-3.1-8b": PageLayout(32, 8, 128, 16, "bfloat16")}
SHORTEST = ("--layouts=qwen3-0.6b", "--pages=4", "--round-trips=100")
WRITER, READER = "p" * 32, "d" * 32  # incarnations
BATCH = 64  # pages per write, as ``Sender.pump`` asks for


# ---- the receiving process ------------------------------------------------------------------------------------------


class Reader:
    """Executes commands, one JSON line each, and polls the transport in between."""

    def __init__(self, layout: PageLayout, num_pages: int, transport: str, device: str, key: str) -> None:
        self.pool = KVPool(layout, num_pages, device)
        _touch(self.pool)
        self.transport = open_reader(self.pool, TransportSettings(transport, READER, cluster_key=key.encode()))
        self.num_pages = num_pages
        self.context: zmq.Context[Any] = zmq.Context()

    def do_offer(self) -> str:
        store, transport = self.pool, self.transport
        endpoint = transport.offer(WRITER, 1)
        connect = Connect("reader", "-", 1, LayoutMessage.of(store.layout), self.num_pages, transport.name, endpoint)
        return msgspec.json.encode(connect).decode()

    def do_chosen(self, name: str) -> bool:
        return self.transport.chosen(WRITER, 1, name)

    def do_allow(self, count: int) -> float:
        self.transport.allow(WRITER, 1, range(count))
        return time.process_time()

    def do_forbid(self, count: int) -> float:
        self.transport.forbid(range(count))
        return time.process_time()

    def do_landed(self, count: int) -> None:
        """Copy the pages to the device, if they have arrived beside it."""
        self.transport.landed(WRITER, range(count))

    def do_listen(self) -> int:
        """A plain socket: 8 bytes with the number of pages, then the pages; answered by one byte when all are there."""
        listener = socket.create_server(("127.0.0.1", 0))
        tune(listener)
        threading.Thread(target=self._swallow, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def _swallow(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        tune(connection)
        size = self.pool.layout.page_bytes
        with memoryview(self.pool.memory) as memory:
            while head := connection.recv(8, socket.MSG_WAITALL):
                for page in range(int.from_bytes(head, "little")):
                    at, end = page * size, (page + 1) * size
                    while at < end:
                        at += connection.recv_into(memory[at:end])
                connection.sendall(b"\1")

    def do_receive_bare(self, port: int) -> None:
        gloo_baseline.receive(self.pool, port)

    def do_echo(self) -> str:
        mailbox = Mailbox(self.context, READER, FromDecode, bind="tcp://127.0.0.1:0")
        threading.Thread(target=self._echo, args=(mailbox,), daemon=True).start()
        return mailbox.address

    @staticmethod
    def _echo(mailbox: Mailbox) -> None:
        while True:
            mailbox.sockets[0].poll(1_000)
            for letter in mailbox.receive():
                mailbox.send(PagesWritten("r", 0, 1, letter.message.pages), target=letter.sender)

    def run(self) -> None:
        pending = b""
        while True:
            ready, _, _ = select.select([0, *self.transport.files()], [], [], 1.0)
            self.transport.poll(time.monotonic())
            if 0 not in ready:
                continue
            data = os.read(0, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                answer = getattr(self, "do_" + command.pop("do"))(**command)
                print(json.dumps(answer), flush=True)


def _touch(pool: KVPool) -> None:
    """Touch every page of memory before anything is timed."""
    pool.pages.view(-1)[::4096] = 0


class ReaderProcess:
    def __init__(self, arguments: argparse.Namespace, layout: str, transport: str, num_pages: int) -> None:
        argv = [sys.executable, "-m", "scripts.benchmarks.services.transfer", layout, str(num_pages), transport]
        argv.append(arguments.device)
        self.process = subprocess.Popen(
            [*argv, arguments.cluster_key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, do: str, **words: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


# ---- measurements --------------------------------------------------------------------------------------------------


class AttachedTransport:
    def __init__(self, child: ReaderProcess, pool: KVPool, transport: str, key: str) -> None:
        self.child = child
        self.pool = pool
        self.writer = open_writer(pool, TransportSettings(transport, WRITER, cluster_key=key.encode()))
        self.writer.attach(READER, msgspec.json.decode(child.ask("offer"), type=Connect))
        until = time.monotonic() + 20
        while not (news := self.writer.poll()):
            select.select(self.writer.files(), [], [], 0.1)
            assert time.monotonic() < until, "the transport did not attach within 20 s"
        assert not news[0].problem, news[0].problem
        assert child.ask("chosen", name=news[0].transport)

    def send(self, count: int) -> tuple[float, float]:
        """Send ``count`` pages; return seconds and CPU seconds of both processes until the last is confirmed."""
        theirs = self.child.ask("allow", count=count)
        ours, begun_at = time.process_time(), time.perf_counter()
        open_tickets = 0
        for at in range(0, count, BATCH):
            self.writer.write(READER, [(page, page) for page in range(at, min(at + BATCH, count))])
            open_tickets += 1
        while open_tickets := open_tickets - len(self.writer.done()):
            select.select(self.writer.files(), [], [], 1.0)
            assert not (news := self.writer.poll()), news[0].problem
        if not self.pool.is_mapped:
            self.child.ask("landed", count=count)
        seconds = time.perf_counter() - begun_at
        self.writer.poll()  # as a node does every turn; some transports defer work to it
        ours = time.process_time() - ours
        return seconds, ours + self.child.ask("forbid", count=count) - theirs


def memcpy(pool: KVPool, target: KVPool) -> Callable[[int], float]:
    size = pool.layout.page_bytes

    def run_on_device(count: int) -> float:
        torch.cuda.synchronize(pool.device)
        begun_at = time.perf_counter()
        target.pages[:count].copy_(pool.pages[:count])
        torch.cuda.synchronize(pool.device)
        return time.perf_counter() - begun_at

    def run(count: int) -> float:
        if not pool.is_mapped:
            return run_on_device(count)
        with memoryview(pool.memory) as source, memoryview(target.memory) as into:
            begun_at = time.perf_counter()
            for page in range(count):
                into[page * size : (page + 1) * size] = source[page * size : (page + 1) * size]
            return time.perf_counter() - begun_at

    return run


def bare_socket(pool: KVPool, port: int) -> Callable[[int], float]:
    size = pool.layout.page_bytes
    connection = socket.create_connection(("127.0.0.1", port))
    tune(connection)

    def run(count: int) -> float:
        with memoryview(pool.memory) as source:
            begun_at = time.perf_counter()
            connection.sendall(count.to_bytes(8, "little"))
            for page in range(count):
                connection.sendall(source[page * size : (page + 1) * size])
            connection.recv(1)
            return time.perf_counter() - begun_at

    return run


def bare_nixl(subject: AttachedTransport) -> Callable[[int], float]:
    """The agent and descriptor lists of the transport itself, used directly while its thread is idle.

    Runs in the thread in which the transport would start the write: the core of the previous copy has the source in its
    caches, which matters more than any difference measured here.
    """
    writer: Any = subject.writer._transports[0]
    agent, peer = writer._agent, writer._peers[READER]
    thread = ThreadPoolExecutor(1)

    def run(count: int) -> float:
        is_here = count * subject.pool.layout.page_bytes * peer.s_per_byte <= HOLD_S
        return write(count) if is_here else thread.submit(write, count).result()

    def write(count: int) -> float:
        subject.child.ask("allow", count=count)
        begun_at = time.perf_counter()
        with agent.lock:
            indices = list(range(count))
            handle = agent.nixl.make_prepped_xfer("WRITE", writer._sources, indices, peer.pages, indices)
            state = agent.nixl.transfer(handle)
            while state == "PROC":
                state = agent.nixl.check_xfer_state(handle)
            seconds = time.perf_counter() - begun_at
            handle.release()
        assert state == "DONE"
        subject.child.ask("forbid", count=count)
        return seconds

    return run


# ---- the run --------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, layout: str, transport: str, counts: Sequence[int]) -> dict[str, float]:
    """Print a line for each transfer size; return their figures."""
    pool, target = (KVPool(LAYOUTS[layout], counts[-1], arguments.device) for _ in range(2))
    _touch(pool)
    _touch(target)
    child = ReaderProcess(arguments, layout, transport, counts[-1])
    figures: dict[str, float] = {}
    try:
        subject = AttachedTransport(child, pool, transport, arguments.cluster_key)
        copy, bare, bare_name = memcpy(pool, target), None, ""
        if transport == "tcp":
            bare, bare_name = bare_socket(pool, child.ask("listen")), "socket"
        elif transport == "nixl":
            bare, bare_name = bare_nixl(subject), "bare nixl"
        elif transport == "gloo":
            store = gloo_baseline.host()
            child.ask("receive_bare", port=store.port)
            bare, bare_name = gloo_baseline.sender(pool, store), "bare gloo"
        for count in counts:
            figures |= _compare(layout, transport, count, subject, copy, bare, bare_name)
        subject.writer.close()
    finally:
        child.close()
        pool.close()
        target.close()
    return figures


def _compare(
    layout: str,
    transport: str,
    count: int,
    subject: AttachedTransport,
    copy: Callable[[int], float],
    bare: Callable[[int], float] | None,
    bare_name: str,
) -> dict[str, float]:
    repeats = max(6, min(30, 1024 // count))
    payload = count * LAYOUTS[layout].page_bytes / 1e9
    rows = []
    for i in range(repeats + 1):
        copied = copy(count)
        barely = bare(count) if bare is not None and i % 2 else 0.0  # the second of the two finds warmer caches
        seconds, cpu = subject.send(count)
        rows.append((seconds, cpu, copied, copied if bare is None else barely or bare(count)))
    seconds, cpu, copied, barely = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    of_copy = statistics.median(row[2] / row[0] for row in rows[1:])
    text = f"{layout:13} {transport:5} {count:5} pages {seconds * 1e3:9.2f} ms {payload / seconds:6.2f} GB/s"
    text += f" {cpu / payload:6.3f} CPU s/GB | memcpy {payload / copied:6.2f} GB/s, ratio {of_copy:4.2f}"
    if bare is not None:
        of_bare = statistics.median(row[3] / row[0] for row in rows[1:])
        more = statistics.median(row[0] - row[3] for row in rows[1:]) * 1e6
        text += f" | {bare_name} {payload / barely:6.2f} GB/s, ratio {of_bare:4.2f}, {more:+.0f} us"
    else:
        text += f" | {(seconds - copied) * 1e6:+.0f} us over memcpy"
    print(text, flush=True)
    name = f"{layout}, {transport}, {count} pages"
    return {f"{name}, GB/s": payload / seconds, f"{name}, CPU s/GB": cpu / payload, f"{name}, of memcpy": of_copy}


def checksums(layout: str, count: int) -> dict[str, float]:
    """Measure the checksums of pages that are not in a cache, which each end of a transfer computes once."""
    pool = KVPool(LAYOUTS[layout], count)
    try:
        _touch(pool)
        sums = Checksums(pool)
        times = []
        for _ in range(5):
            begun_at = time.process_time()
            for page in range(count):
                sums.of_source(page, None)
            times.append(time.process_time() - begun_at)
    finally:
        pool.close()
    gigabytes_s = count * LAYOUTS[layout].page_bytes / 1e9 / statistics.median(times)
    per_token_us = statistics.median(times) / (count * LAYOUTS[layout].page_size) * 1e6
    what = f"{gigabytes_s:.1f} GB/s, {per_token_us:.1f} us of CPU per token at each end"
    print(f"{layout:13} checksum, {count} pages: {what}", flush=True)
    return {f"{layout}, checksum, GB/s": gigabytes_s, f"{layout}, checksum, us per token": per_token_us}


def round_trip(arguments: argparse.Namespace) -> dict[str, float]:
    """Measure the round trip of a grant and its confirmation, through the mailboxes of nodes."""
    child = ReaderProcess(arguments, "qwen3-0.6b", "shm", 1)
    context: zmq.Context[Any] = zmq.Context()
    try:
        mailbox = Mailbox(context, new_incarnation(), FromPrefill, connect=child.ask("echo"))
        times = []
        for _ in range(arguments.round_trips):
            begun_at = time.perf_counter()
            mailbox.send(Grant("r", 0, 1, 0, (1, 2, 3, 4)), target=READER)
            while not mailbox.receive():
                mailbox.sockets[0].poll(1_000)
            times.append(time.perf_counter() - begun_at)
        mailbox.close()
    finally:
        child.close()
        context.term()
    p50, p99 = (1e6 * float(np.quantile(times, share)) for share in (0.5, 0.99))
    print(f"control round trip: p50 {p50:.0f} us, p99 {p99:.0f} us", flush=True)
    return {"control round trip, p50 us": p50, "control round trip, p99 us": p99}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transports",
        type=comma_separated(str, among=TRANSPORTS),
        default="shm,tcp,nixl,gloo",
        help="(%(default)s)",
    )
    parser.add_argument(
        "--layouts", type=comma_separated(str, among=LAYOUTS), default=",".join(LAYOUTS), help="of %(default)s"
    )
    parser.add_argument(
        "--pages", type=comma_separated(int), default="1,4,16,64,256,1024", help="transfer sizes (%(default)s)"
    )
    parser.add_argument("--round-trips", type=int, default=1000, help="control messages to time (%(default)s)")
    parser.add_argument("--device", default="cpu", help="of both pools; memcpy is then within it (%(default)s)")
    parser.add_argument("--cluster-key", default="", help="key that authenticates tcp")


def run(options: argparse.Namespace) -> dict[str, float]:
    print(f"load {os.getloadavg()[0]:.1f}; {os.cpu_count()} cores; UCX_TLS={os.environ.get('UCX_TLS', 'unset')}")
    figures = round_trip(options)
    counts = sorted(options.pages)
    for layout in options.layouts:
        figures |= checksums(layout, counts[-1])
        for transport in options.transports:
            try:
                figures |= measure(options, layout, transport, counts)
            except ConfigError as error:
                print(f"{layout:13} {transport:5} not measured: {error}")
    return figures


if __name__ == "__main__":
    name, pages, transport_name, device_name, cluster_key = sys.argv[1:]
    Reader(LAYOUTS[name], int(pages), transport_name, device_name, cluster_key).run()
