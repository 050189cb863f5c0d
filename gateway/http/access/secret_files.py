"""Permissions of the files with keys that operators hand to the gateway."""

import logging

log = logging.getLogger(__name__)

#: Users other than the owner must not read such a file; members of its group may. Only the owner may change it.
OPEN_BITS = 0o027


def warn_of_open_file(described: str, mode: int) -> None:
    """Log a warning if users other than the owner could read or change the file.

    Args:
        described: the flag and the path.
        mode: of the file, as ``os.stat`` returns it.
    """
    if mode & OPEN_BITS:
        log.warning("%s can be read or changed by other users; restrict it with chmod 600", described)
