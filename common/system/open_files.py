"""The number of files that a process may open: a connection to each of a thousand nodes or clients is one or more."""

import logging
import math
import resource
import time

log = logging.getLogger(__name__)

#: Descriptors that are left when the log says so, and the seconds between two such lines.
FEW, SAID_S = 8, 60.0


def raise_open_file_limit() -> int:
    """Let this process open as many files as it may ask for. Return how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class OpenFileWarning:
    """Says in the log, at most once a minute, that hardly any descriptor is left for a further connection.

    uvloop closes connections for which there is none, and does not report it. The kernel gives a new file the lowest
    free number, so one near the limit means that nearly all are in use.
    """

    def __init__(self) -> None:
        self._limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._said_at = -math.inf

    def note(self, fd: int) -> None:
        """Look at the number of a file that was opened just now."""
        if fd >= self._limit - FEW and (now := time.monotonic()) - self._said_at >= SAID_S:
            self._said_at = now
            log.error(
                "%d of %d descriptors are in use; once all are, further connections are closed: raise ulimit -n",
                fd,
                self._limit,
            )
