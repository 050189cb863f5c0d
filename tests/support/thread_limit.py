"""What a process does that may have no further thread."""

import threading


def refuse_thread(thread: threading.Thread) -> None:
    """In the place of ``threading.Thread.start``."""
    raise RuntimeError("can't start new thread")
