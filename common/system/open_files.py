"""The number of files that a process may open: a connection to each of a thousand nodes or clients is one or more."""

import resource


def raise_open_file_limit() -> int:
    """Lets this process open as many files as it may ask for. Returns how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
