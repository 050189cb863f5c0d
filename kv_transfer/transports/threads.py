"""Starts the threads of transports."""

import errno
import threading


def start_thread(thread: threading.Thread) -> None:
    """Raises OSError: this process may have no further thread."""
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, "no further thread can be started") from error
