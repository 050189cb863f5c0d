"""Records the steps of a node with torch's profiler and writes them as traces for Perfetto and ``chrome://tracing``.

A profile ends at the request of the gateway, after its steps, or after ``MAX_S``. torch records the thread that begins
a profile, so that all methods are called on the engine's thread; the file is written by a thread of its own, since that
takes seconds.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.wire.messages import MAX_SENTENCE, ProfileAnswer, StartProfile, StopProfile

log = logging.getLogger(__name__)

MAX_S = 60.0
NO_FOLDER = "profiling is off at this node; start it with --profile-dir DIR"

Answer = Callable[[ProfileAnswer], None]


class Profiler:
    """Profiles the steps of a node.

    Args:
        folder: of the traces; created if it is missing.
        node: its name begins the names of the files.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, node: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create --profile-dir {folder}: {error.strerror}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"--profile-dir {folder}: this process may not write there")
        self._folder = folder.resolve()
        self._node = re.sub(r"[^A-Za-z0-9_.-]", "_", node)[:128]
        self._profile: Any = None
        self._file = Path()
        self._num_steps = self._max_steps = 0
        self._ends_at = 0.0
        self._lock = threading.Lock()  # over what the writing thread shares
        self._is_written = True
        self._last: ProfileAnswer | None = None  # the last profile, until its end has been asked for
        self._waiting: list[tuple[int, Answer]] = []  # questions to answer when the file is written

    def handle(self, message: StartProfile | StopProfile, answer: Answer) -> None:
        """Start or stop a profile; ``answer`` is called once, perhaps later and on another thread."""
        if isinstance(message, StartProfile):
            try:
                outcome = self._start(message)
            except Exception as error:  # the engine's thread must go on: libraries and the folder fail in many ways
                outcome = _numbered(_failure(error), message.number)
            answer(outcome)
        else:
            self._stop(message, answer)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until ``end`` is due; None while nothing is recorded."""
        return None if self._profile is None else max(self._ends_at - time.monotonic(), 0.0)

    def after_step(self) -> None:
        if self._profile is None:
            return
        self._num_steps += 1
        try:
            self._profile.step()
        except Exception as error:
            self._profile = None
            self._written(_failure(error))
            return
        if self._num_steps >= self._max_steps or time.monotonic() >= self._ends_at:
            self.end()

    def end(self) -> None:
        """End the profile and begin to write its file."""
        profile, self._profile = self._profile, None
        self._is_written = False
        file, num_steps = self._file, self._num_steps
        try:
            profile.stop()
            work = (profile, file, num_steps)
            threading.Thread(target=self._write, args=work, name="profile", daemon=True).start()
        except Exception as error:  # of torch, or the process may have no further thread
            self._written(_failure(error))

    def _start(self, message: StartProfile) -> ProfileAnswer:
        if self._profile is not None or not self._is_written:
            return ProfileAnswer(error="a profile is being recorded or written; stop it first", number=message.number)
        import torch
        from torch.profiler import ProfilerActivity, profile

        has_cuda = torch.cuda.is_available()
        kinds = {"CPU": ProfilerActivity.CPU, **({"GPU": ProfilerActivity.CUDA} if has_cuda else {})}
        activities = [kinds[name] for name in message.activities if name in kinds]
        if not activities:
            return ProfileAnswer(error="there is no GPU to profile at this node; ask for CPU", number=message.number)
        self._file = self._new_file()
        self._num_steps, self._max_steps = 0, message.num_steps
        started = profile(activities=activities, with_stack=message.with_stack, record_shapes=message.record_shapes)
        started.start()
        self._profile = started
        self._ends_at = time.monotonic() + MAX_S
        self._last = None
        log.info("profiling up to %d steps into %s", message.num_steps, self._file)
        return ProfileAnswer(file=str(self._file), number=message.number)

    def _stop(self, message: StopProfile, answer: Answer) -> None:
        if self._profile is not None:
            self.end()
        with self._lock:
            if not self._is_written:
                self._waiting.append((message.number, answer))
                return
            last, self._last = self._last, None
        last = last or ProfileAnswer(error="no profile has been started; start one first")
        answer(_numbered(last, message.number))

    def _new_file(self) -> Path:
        """A name of node and time that no file has."""
        stem = f"{self._node}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        file, count = self._folder / f"{stem}.trace.json.gz", 1
        while file.exists():
            count += 1
            file = self._folder / f"{stem}-{count}.trace.json.gz"
        return file

    def _write(self, profile: Any, file: Path, num_steps: int) -> None:
        try:
            profile.export_chrome_trace(str(file))
        except Exception as error:
            log.exception("the profile could not be written")
            self._written(ProfileAnswer(error=f"{file} could not be written: {error}"[:MAX_SENTENCE]))
        else:
            log.info("wrote the profile of %d steps to %s", num_steps, file)
            self._written(ProfileAnswer(file=str(file), num_steps=num_steps))

    def _written(self, outcome: ProfileAnswer) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._last = None if waiting else outcome
            self._is_written = True
        for number, answer in waiting:
            answer(_numbered(outcome, number))


def _failure(error: Exception) -> ProfileAnswer:
    log.error("the profiler failed", exc_info=error)
    return ProfileAnswer(error=f"the profiler failed: {error}"[:MAX_SENTENCE])


def _numbered(answer: ProfileAnswer, number: int) -> ProfileAnswer:
    return ProfileAnswer(answer.file, answer.num_steps, answer.error, number)
