"""The incarnation: an id of one start of one process in one role. After a restart or a change of role it differs."""

import secrets


def new_incarnation(fingerprint: str = "") -> str:
    """Return a random id of 32 hexadecimal digits.

    Args:
        fingerprint: begins the id: that of the process's key, if it has one (see ``common.wire.curve``).
    """
    return fingerprint + secrets.token_hex((32 - len(fingerprint)) // 2)
