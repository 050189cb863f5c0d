"""How a child process has ended, in words."""

import signal


def how_ended(status: int) -> str:
    """Return ``killed by SIGKILL`` or ``ended with status 1``.

    Args:
        status: as ``subprocess.Popen.returncode``; a negative number is that of the signal that ended the process.
    """
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no names
        return f"killed by signal {-status}"
