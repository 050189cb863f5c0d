"""The incarnation: an id of one start of one process. A restarted process has another one."""

import secrets


def new_incarnation() -> str:
    """Return a random id of 128 bits as 32 hexadecimal digits; called once at the start of a process."""
    return secrets.token_hex(16)
