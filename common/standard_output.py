"""What a command says and returns when standard output cannot be written."""

import errno
import sys

#: Failures of standard output: its reader has ended, or its disk is full or broken.
OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)


def output_failed(command: str, error: OSError) -> int:
    """Report a failure of standard output, unless its reader has ended, as of ``baton bench | head``; return 1."""
    sys.stdout = None  # otherwise the interpreter fails again when it flushes at exit
    if error.errno != errno.EPIPE:
        print(f"{command}: cannot write to standard output: {error.strerror}", file=sys.stderr)
    return 1
