"""Processes that each have one end of a transport, and what tests make them do."""

import contextlib
import hashlib
import json
import os
import select
import signal
from pathlib import Path
from typing import Any

from support.kv.kv_fakes import DECODE, PREFILL
from support.kv.transport_process import page_content
from support.service.fork_server import ForkServer
from support.waiting import until

TRANSPORTS = ("shm", "cuda-ipc", "tcp", "nixl", "gloo")


class End:
    """A process with one end of a transport; see ``transport_process``."""

    def __init__(self, fork_server: ForkServer, role: str, transport: str, key: str = "", **environment: str) -> None:
        on_gpu = {"TEST_GPU": "1"} if "TEST_GPU" in os.environ else {}
        self.process = fork_server.start(role, transport, key, **on_gpu, **environment)
        self.pid: int = self.answer()
        assert self.pid == self.process.pid

    def answer(self) -> Any:
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        assert ready, "no answer"
        return json.loads(self.process.stdout.readline())

    def tell(self, do: str, **words: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self.process.stdin.flush()

    def ask(self, do: str, **words: Any) -> Any:
        self.tell(do, **words)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """Return when a SIGSTOP has reached every thread: the first to hear of it may have to wait for a core."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            until(lambda: all(state == "T" for state in _states(self.pid)))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def _states(pid: int) -> list[str]:
    """Of a process's threads."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


def join(writer: End, reader: End, transport: str, epoch: int = 1) -> None:
    news = try_to_join(writer, reader, epoch)
    assert news == [[DECODE, epoch, "", transport]], news  # pytest shows nothing of this module by itself
    assert reader.ask("chosen", peer=PREFILL, epoch=epoch, transport=transport)


def try_to_join(writer: End, reader: End, epoch: int) -> Any:
    """Attach the writer to the reader. Return what the writer says of it."""
    connect = reader.ask("offer", peer=PREFILL, epoch=epoch)
    assert writer.ask("attach", peer=DECODE, connect=connect) == ""
    return until(lambda: writer.ask("news"))


def ship(writer: End, reader: End, pages: list[tuple[int, int, int]], epoch: int = 1) -> None:
    """(seed, source, target): written, and over."""
    reader.ask("allow", peer=PREFILL, epoch=epoch, pages=[target for _, _, target in pages])
    ticket = writer.ask("write", peer=DECODE, pages=pages)
    assert until(lambda: writer.ask("finished")) == [ticket]


def digests(*seeds: int) -> list[str]:
    return [hashlib.sha256(page_content(seed)).hexdigest() for seed in seeds]
