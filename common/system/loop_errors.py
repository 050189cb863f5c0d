"""Reports errors of an event loop that belong to no task, such as that no descriptor is left for a connection."""

import asyncio
import errno
import logging
import math
from typing import Any

log = logging.getLogger(__name__)

#: Seconds between two log lines that say that no connection can be accepted.
FULL_S = 60.0
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class LoopErrors:
    """Reports what fails on the event loop and in no task, as asyncio does by default, except for one flood.

    While this process can have no further connection, asyncio reports that with a traceback for each place in the
    backlog of a server whenever it attempts to accept those that wait, and it attempts that several times a second.
    """

    def __init__(self) -> None:
        self._said_at = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in EXHAUSTED and "socket" in context):
            loop.default_exception_handler(context)
        elif loop.time() - self._said_at >= FULL_S:
            self._said_at = loop.time()
            reason = error.strerror
            log.error("no further connection can be accepted until others end: %s; raise ulimit -n", reason)
