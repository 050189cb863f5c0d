"""Writes files of API keys."""

from pathlib import Path
from typing import Any

from gateway.http.access.api_keys import HASHED, digest_of


def write_key_file(path: Path, **keys: dict[str, Any]) -> str:
    """Write a file with the fields of each key; return its name."""
    path.touch(0o600)
    lines = []
    for key, fields in keys.items():
        lines += ["[[key]]", f'hash = "{HASHED}{digest_of(key).hex()}"']
        lines += [f"{name} = {_toml(value)}" for name, value in fields.items()]
    path.write_text("\n".join(lines))
    return str(path)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool | int) else f'"{value}"'
