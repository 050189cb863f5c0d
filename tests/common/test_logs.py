"""Log lines: their two forms, and that a reader of standard error who stops or leaves never stops a process."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from common.logs import FIELDS, ConsoleFormatter, JsonFormatter, LogHandler, LogWriter

ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = "import logging, warnings, threading, os; from common.logs import configure_logging;"


def record(message="hello %s", *args, **extra):
    made = logging.getLogger("some.logger").makeRecord("some.logger", logging.INFO, "", 0, message, args, None, None)
    made.__dict__.update(extra)
    return made


def run(code: str, log_format: str) -> "subprocess.CompletedProcess[str]":
    setup = f"{PREAMBLE} writer = configure_logging('here', level='info', log_format='{log_format}')\n"
    return subprocess.run(
        [sys.executable, "-c", f"{setup}{code}\nwriter.close()"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_a_json_line_has_the_five_fields_and_those_of_the_record():
    made = record("hello %s", "world", created=1700000000.25, **{FIELDS: {"rid": "r", "ttft_s": None}})
    assert json.loads(JsonFormatter("decode-0").format(made)) == {
        "time": "2023-11-14T22:13:20.250000Z",
        "level": "info",
        "process": "decode-0",
        "logger": "some.logger",
        "message": "hello world",
        "rid": "r",
        "ttft_s": None,
    }


def test_a_line_of_the_console_shows_fields_as_words_and_cannot_be_forged():
    made = record("ended", **{FIELDS: {"rid": "a\n12:00:00 INFO forged", "tenant": "", "ttft_s": 0.123456, "n": 3}})
    shown = ConsoleFormatter("gateway").format(made)
    assert shown.endswith(r" INFO gateway ended rid='a\n12:00:00 INFO forged' ttft_s=0.1235 n=3")
    assert "\n" not in shown


def test_text_of_another_process_in_a_message_looks_like_no_line_of_the_console():
    reason = "no\n12:00:00 ERROR gateway forged\r\x1b[2J\u2028\udcff\n"
    shown = ConsoleFormatter("gateway").format(record("node d refused: %s", reason))
    first, second = shown.split("\n")
    assert first.endswith(" INFO gateway node d refused: no")
    assert second == r"    12:00:00 ERROR gateway forged\r\x1b[2J\u2028\udcff"


def test_the_text_of_an_exception_looks_like_no_line_of_the_console():
    made = record("a request failed%s", "")
    try:
        raise ValueError("no\n12:00:00 ERROR gateway forged\r\x1b[2J\udcff")
    except ValueError:
        made.exc_info = sys.exc_info()
    first, *others = ConsoleFormatter("gateway").format(made).split("\n")
    assert first.endswith(" INFO gateway a request failed")
    assert others[0] == "    Traceback (most recent call last):"
    assert others[-2:] == ["    ValueError: no", r"    12:00:00 ERROR gateway forged\r\x1b[2J\udcff"]
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_a_line_that_cannot_be_formatted_shows_why_without_control_characters():
    class Argument:
        def __str__(self):
            raise ValueError("no\n12:00:00 ERROR gateway forged\x1b[2J")

    written = []
    handler = LogHandler(SimpleNamespace(write=written.append))
    handler.setFormatter(ConsoleFormatter("gateway"))
    handler.emit(record("%s", Argument()))
    assert written == [
        b"a log line could not be formatted: ValueError: no\n    12:00:00 ERROR gateway forged\\x1b[2J\n"
    ]


def test_line_ends_and_lone_surrogates_stay_inside_of_a_json_line():
    shown = JsonFormatter("p").format(record("a\nb \udcff"))
    assert "\n" not in shown
    assert json.loads(shown)["message"] == "a\nb \\udcff"


def test_exceptions_warnings_and_lines_of_libraries_are_json_objects_of_one_line():
    done = run(
        "try:\n    1 / 0\n"
        "except ZeroDivisionError:\n    logging.getLogger('uvicorn.error').exception('failed')\n"
        "warnings.warn('old')\n"
        "thread = threading.Thread(target=lambda: [][1], name='t'); thread.start(); thread.join()\n"
        "writer.close()\n"
        "raise KeyError('end')",
        "json",
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["logger"] for line in lines[:3]] == ["uvicorn.error", "py.warnings", "common.logs"]
    assert lines[0]["message"] == "failed"
    assert lines[0]["exception"].startswith("Traceback") and lines[0]["exception"].endswith("division by zero")
    assert "old" in lines[1]["message"]
    assert "IndexError" in lines[2]["exception"]


def test_a_process_goes_on_while_nothing_reads_its_log_and_says_what_was_lost():
    code = (
        f"{PREAMBLE} writer = configure_logging('here', level='info', log_format='json')\n"
        "for i in range(100_000): logging.info('%d %s', i, 'x' * 100)\n"
        "print('done', flush=True); input()\n"
        "logging.info('the last line'); writer.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None and process.stdin is not None
        assert process.stdout.readline() == "done\n"  # although the pipe of standard error has been full for long
        lines = iter(process.stderr.readline, "")
        messages = [json.loads(next(lines))["message"]]
        while "were dropped" not in messages[-1]:
            messages.append(json.loads(next(lines))["message"])
        num_lost = int(messages[-1].split()[0])
        assert num_lost + len(messages) - 1 == 100_000
        process.stdin.write("\n")
        process.stdin.flush()
        assert json.loads(next(lines))["message"] == "the last line"
        assert process.wait(60) == 0


def test_lines_for_which_the_disk_has_no_room_are_counted(tmp_path: Path):
    path = tmp_path / "log"
    fd = os.open("/dev/full", os.O_WRONLY)
    writer = LogWriter(fd, lambda count: b"%d were dropped\n" % count)
    for _ in range(100):
        writer.write(b"a line\n")
    ends = time.monotonic() + 60
    while writer._num_dropped < 100 and time.monotonic() < ends:
        time.sleep(0.01)
    with path.open("wb") as file:
        os.dup2(file.fileno(), fd)  # there is room again
    writer.write(b"the last line\n")
    writer.close()
    os.close(fd)
    assert path.read_bytes() == b"the last line\n100 were dropped\n"


def test_a_process_ends_in_good_order_although_its_log_is_never_read():
    code = (
        f"{PREAMBLE} writer = configure_logging('here', level='info', log_format='console')\n"
        "for i in range(10_000): logging.info('x' * 100)\n"
        "writer.close(); print('closed', flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "closed\n"
        assert process.wait(60) == 0


def test_a_closed_standard_error_is_no_error():
    code = f"{PREAMBLE} configure_logging('here', level='info', log_format='console'); logging.info('x'); print('on')"
    for redirection in ("2>&-", "2>/dev/full"):
        command = f"exec '{sys.executable}' -c \"{code}\" {redirection}"
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "on\n")
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; input(); logging.info('y'); print('still on')"], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        process.stderr.close()
        out, _ = process.communicate("\n", timeout=60)
        assert (process.returncode, out) == (0, "on\nstill on\n")


def test_a_line_that_comes_just_before_the_close_is_written():
    """The thread has found its queue empty, and not yet looked whether it is to end."""
    reader, out = os.pipe()
    found_empty, is_last_queued = threading.Event(), threading.Event()

    class Paused(LogWriter):
        def _take(self) -> bytes:
            chunk = super()._take()
            if not chunk and not found_empty.is_set():
                found_empty.set()
                is_last_queued.wait(60)
            return chunk

    writer = Paused(out, lambda count: b"")
    writer.write(b"first\n")
    assert found_empty.wait(60)
    writer.write(b"last\n")
    writer._is_closing.set()
    is_last_queued.set()
    writer.close()
    os.close(out)
    with os.fdopen(reader, "rb") as stream:
        assert stream.read() == b"first\nlast\n"


def test_a_standard_error_that_does_not_block_gets_every_line():
    reader, out = os.pipe()
    os.set_blocking(out, False)
    writer = LogWriter(out, lambda count: b"")
    lines = [b"%d" % number + b"x" * 1_000 + b"\n" for number in range(200)]  # more than a pipe holds
    for line in lines:
        writer.write(line)
    with os.fdopen(reader, "rb") as stream:
        assert [stream.readline() for _ in lines] == lines
    writer.close()
    os.close(out)
