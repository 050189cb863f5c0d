"""A reader of a shared-memory pool, with writers in this process and in another one."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL

from common.wire.messages import Connect, LayoutMessage
from kv_transfer.transports.base import Attached, AttachError, Fenced
from kv_transfer.transports.shm import ShmReader, ShmWriter

TESTS = Path(__file__).resolve().parents[2]
NUM_PAGES = 8
KEY = ("r", 0)


class WriterProcess:
    """A writer in its own process; see ``shm_writer_process``."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        command = [sys.executable, str(TESTS / "support" / "kv" / "shm_writer_process.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        assert self.answer() == self.process.pid

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, **command: Any) -> Any:
        self.tell(**command)
        return self.answer()

    def attach(self, reader: ShmReader, connect: Connect) -> str:
        self.tell(do="attach", peer=DECODE, connect=msgspec.json.encode(connect).decode())
        assert self.process.stdout is not None
        while not select.select([self.process.stdout], [], [], 0.005)[0]:
            reader.poll(time.monotonic())
        return str(self.answer())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def offer(reader: ShmReader, epoch: int = 1, peer: str = PREFILL) -> Connect:
    endpoint = reader.offer(peer, epoch)
    return Connect("decode-0", "model", epoch, LayoutMessage.of(LAYOUT), NUM_PAGES, "shm", endpoint)


def attach(reader: ShmReader, writer: ShmWriter, connect: Connect, *, peer: str = DECODE) -> str:
    """Attach a writer of this process; return the problem, empty if none."""
    try:
        writer.attach(peer, connect)
    except AttachError as error:
        return str(error)
    for _ in range(100):
        reader.poll(0.0)
        if news := writer.poll():
            assert news == [Attached(peer, connect.epoch, news[0].problem)]
            return news[0].problem
    raise AssertionError("not attached after 100 turns")


def wait_for_news(reader: ShmReader, timeout_s: float = 60.0) -> list[Fenced]:
    """Wait on the reader's descriptors for news, as a node does; empty after ``timeout_s``."""
    until = time.monotonic() + timeout_s
    while (left := until - time.monotonic()) > 0:
        select.select(reader.files(), [], [], left)
        if news := reader.poll(0.0):
            return news
    return []


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
