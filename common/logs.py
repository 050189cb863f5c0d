"""Log lines of every process: their two formats, and the thread that writes them to standard error.

A line never waits for the reader of standard error: it is queued, and a thread writes what is queued. If nothing reads,
lines beyond ``MAX_WAITING_BYTES`` are dropped, and so are lines for which the disk has no room; once lines can be
written again, one of them says how many were dropped.
"""

import logging
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from common.config.shared import LogFormat

MAX_WAITING_BYTES = 4 << 20
#: Lines that follow the first within this time are written with it: waking the thread costs more than a line.
GATHER_S = 0.01
#: The longest time that the end of a process waits for its last lines to be written.
CLOSE_S = 1.0
CHUNK_BYTES = 1 << 16

#: Attribute of a log record with the fields that it has beside its message: ``log.info("...", extra={FIELDS: {...}})``.
FIELDS = "fields"

log = logging.getLogger(__name__)


class LogWriter:
    """Writes lines to a file descriptor on a thread; ``write`` never blocks.

    Args:
        note_dropped: makes the line that says how many lines were dropped.
    """

    def __init__(self, fd: int, note_dropped: Callable[[int], bytes]) -> None:
        self._fd = fd
        self._note_dropped = note_dropped
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = self._num_dropped = 0
        self._has_lines = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue a line, which ends with a newline."""
        with self._lock:
            if self._num_bytes + len(line) > MAX_WAITING_BYTES:
                self._num_dropped += 1
                return
            self._waiting.append(line)
            self._num_bytes += len(line)
        if not self._has_lines.is_set():
            self._has_lines.set()

    def close(self) -> None:
        """Write what is queued, within ``CLOSE_S``."""
        self._is_closing.set()
        self._has_lines.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._has_lines.wait()
            self._is_closing.wait(GATHER_S)
            self._has_lines.clear()
            self._write_waiting()
        self._write_waiting()  # lines that came between the last look at the queue and the close

    def _write_waiting(self) -> None:
        """Write the queue, and then the note of dropped lines."""
        while chunk := self._take():
            self._count_dropped(self._write_all(chunk))
        num_dropped = self._num_dropped
        if num_dropped and not self._write_all(self._note_dropped(num_dropped)):
            self._count_dropped(-num_dropped)

    def _take(self) -> bytes:
        """About ``CHUNK_BYTES`` of the queue; empty if nothing waits."""
        with self._lock:
            lines, size = [], 0
            while self._waiting and size < CHUNK_BYTES:
                lines.append(self._waiting.popleft())
                size += len(lines[-1])
            self._num_bytes -= size
        return b"".join(lines)

    def _count_dropped(self, num_lines: int) -> None:
        with self._lock:
            self._num_dropped += num_lines

    def _write_all(self, data: bytes) -> int:
        """Return the number of lines that could not be written: the reader is gone, or the disk is full."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # another process that has this terminal or pipe has made it so
                select.select((), (self._fd,), ())
            except OSError:
                return bytes(view).count(b"\n")
        return 0


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``process``, ``logger``, ``message``, and fields of the record."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._encode = msgspec.json.Encoder(enc_hook=str).encode
        self._second, self._shown = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self._time(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _fields_of(record)
        if record.exc_info:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        try:
            return self._encode(line).decode()
        except UnicodeEncodeError:  # lone surrogates, which JSON in UTF-8 cannot hold
            return self._encode({key: _encodable(value) for key, value in line.items()}).decode()

    def _time(self, created: float) -> str:
        """The time in UTC as RFC 3339 has it, with microseconds."""
        second = int(created)
        if second != self._second:
            self._second, self._shown = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._shown}.{int((created - second) * 1e6):06d}Z"


class ConsoleFormatter(logging.Formatter):
    """Time, level, process and message; then the record's fields as ``name=value``, and a traceback in lines below."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process.replace('%', '%%')} %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        shown = _harmless(super().formatMessage(record))
        fields = _fields_of(record)
        if fields:
            shown += "".join(f" {name}={_word(value)}" for name, value in fields.items() if value not in (None, ""))
        return shown

    def formatException(self, ei: Any) -> str:
        return "    " + _harmless(super().formatException(ei))


class LogHandler(logging.Handler):
    """Hands formatted lines to a writer."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # a wrong argument of a third-party call must not end what it reports on
            line = _harmless(f"a log line could not be formatted: {type(error).__name__}: {error}")
        self._writer.write(line.encode(errors="backslashreplace") + b"\n")


def configure_logging(process: str, *, level: str, log_format: LogFormat) -> LogWriter | None:
    """Send the log records of this process, those of all libraries too, to standard error.

    Warnings and exceptions that nothing handles become log records.

    Args:
        process: name of the process, shown in every line.
    Returns:
        The writer, which has to be closed before the process ends; None if standard error is closed.
    """
    formatter = JsonFormatter(process) if log_format == "json" else ConsoleFormatter(process)
    writer = _open_writer(formatter)
    handler = logging.NullHandler() if writer is None else LogHandler(writer)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # neither format shows them
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda failed: _log_uncaught(
        failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback
    )
    return writer


def _open_writer(formatter: logging.Formatter) -> LogWriter | None:
    """A writer to standard error; None if that is closed, so that nothing goes to a file that took its number."""
    if sys.stderr is None:
        return None

    def note_dropped(count: int) -> bytes:
        text = "%d log lines were dropped: standard error was not read, or its disk was full"
        record = log.makeRecord(log.name, logging.WARNING, "", 0, text, (count,), None)
        return formatter.format(record).encode() + b"\n"

    return LogWriter(sys.stderr.fileno(), note_dropped)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        log.critical("an exception was not handled", exc_info=(kind, error, trace))


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, FIELDS, {})
    return fields


def _harmless(text: str) -> str:
    """A message for the console: its further lines are indented, and what else cannot be printed is escaped, so that
    text of a client or of another process looks like no line of ours.
    """
    if text.isprintable():
        return text
    lines = text.rstrip().split("\n")
    return "\n    ".join("".join(char if char.isprintable() else repr(char)[1:-1] for char in line) for line in lines)


def _word(value: Any) -> str:
    """A value for the console; quoted where it has spaces, quotes or line ends, so that a client cannot forge lines."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isalnum() or (text.isprintable() and not set(text) & set(" \"'=")) else repr(text)


def _encodable(value: Any) -> Any:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
