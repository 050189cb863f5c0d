"""What an event loop reports of errors that belong to no task."""

import asyncio
import errno

import pytest

from common.system.loop_errors import LoopErrors


async def test_connections_that_cannot_be_accepted_are_reported_once_and_other_errors_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, report = asyncio.get_running_loop(), LoopErrors()
    full = OSError(errno.EMFILE, "Too many open files")
    for _ in range(1_000):
        report(loop, {"message": "socket.accept() failed", "exception": full, "socket": None})
    for _ in range(2):
        report(loop, {"message": "a task failed", "exception": LookupError("a bug")})
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == ["no further connection can be accepted until others end", "a task failed", "a task failed"]
