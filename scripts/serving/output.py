"""What ``serve`` writes to standard error: its own lines, and those of its children with their names in front."""

import logging
from typing import Protocol

import msgspec

from common.config.shared import LogFormat
from common.logs import JsonFormatter, configure_logging


class Output(Protocol):
    def say(self, text: str) -> None:
        """Write a line of serve's own."""
        ...

    def relay(self, name: str, line: str) -> None:
        """Write a line of a child's."""
        ...


class ServeOutput:
    """Lines on standard error, in the form that ``--log-format`` names. No call blocks.

    A child's line that is a JSON object is copied as it is, since it names its process. Any other line of a child, such
    as one that a library in C has printed, becomes an object in the same form.
    """

    def __init__(self, log_format: LogFormat, log_level: str = "info") -> None:
        self._writer = configure_logging("serve", level=log_level, log_format=log_format)
        self._is_json = log_format == "json"

    def say(self, text: str) -> None:
        self._write(_as_json("serve", text) if self._is_json else f"serve: {text}")

    def relay(self, name: str, line: str) -> None:
        if not self._is_json:
            line = f"{name} | {line}"
        elif not _is_object(line):
            line = _as_json(name, line)
        self._write(line)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, line: str) -> None:
        if self._writer is not None:
            self._writer.write(line.encode(errors="backslashreplace") + b"\n")


def _as_json(process: str, text: str) -> str:
    record = logging.LogRecord("serve", logging.INFO, "", 0, text, None, None)
    return JsonFormatter(process).format(record)


def _is_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        msgspec.json.decode(line, type=dict)
    except msgspec.DecodeError:
        return False
    return True
