"""One start of one process. A replaced process behind the same name and address has another, and is another."""

import secrets


def new_incarnation() -> str:
    """A random id of 128 bits as 32 hex digits, drawn once when a process starts."""
    return secrets.token_hex(16)
