"""The keys of a gateway: those of the command line, and a file of hashed keys that is read again when it changes.

The file is TOML, with one table for each key:

    [[key]]
    hash = "sha256:9f86d0..."             # of the key; `baton apikey` makes both
    tenant = "search"                     # optional
    requests = 8                          # optional limits of the tenant, at one of its keys
    tokens_per_minute = 60000
    expires = 2027-06-30T00:00:00Z        # optional
    admin = true                          # optional
"""

import asyncio
import hashlib
import logging
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.config.gateway import GatewayConfig
from common.config.tenancy import Quota
from common.errors import ConfigError
from gateway.http.access.auth import TENANT, ApiKey
from gateway.http.access.secret_files import warn_of_open_file

log = logging.getLogger(__name__)

HASHED = "sha256:"
MAX_FILE_BYTES = 4 << 20
#: Seconds between two looks at whether the file has changed.
POLL_S = 1.0

_Count = Annotated[int, Meta(ge=1)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One table of the file."""

    hash: Annotated[str, Meta(pattern=rf"^{HASHED}[0-9a-fA-F]{{64}}\Z")]
    tenant: Annotated[str, Meta(pattern=rf"^{TENANT.pattern}\Z")] = ""
    requests: _Count | None = None
    tokens_per_minute: _Count | None = None
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    admin: bool = False

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash.removeprefix(HASHED))

    @property
    def key(self) -> ApiKey:
        return ApiKey(self.tenant, self.admin, self.expires.timestamp() if self.expires else None)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The content of a file: keys by the SHA-256 digest, and the limits of tenants."""

    keys: Mapping[bytes, ApiKey]
    quotas: Mapping[str, Quota]


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def permanent_keys(config: GatewayConfig) -> dict[bytes, ApiKey]:
    """The keys of --api-key and --admin-api-key."""
    given = ((config.api_key, ApiKey()), (config.admin_api_key, ApiKey(is_admin=True)))
    return {digest_of(text): key for text, key in given if text}


class ApiKeyFile:
    """The file of ``--api-key-file``.

    Args:
        permanent: keys that the file must not repeat.
        quotas: limits of tenants that the file must not repeat.
    """

    def __init__(self, path: Path, permanent: Iterable[bytes], quotas: Mapping[str, Quota]) -> None:
        self._path = path
        self._flag = f"--api-key-file {path}"
        self._permanent = frozenset(permanent)
        self._quotas = quotas
        self._signature: tuple[int, ...] | None = None

    def read(self) -> KeyFile:
        """Read the file. Raises ConfigError: names the file and the table, never a key."""
        try:
            status = os.stat(self._path)
            self._signature = _signature(status)
            if status.st_size > MAX_FILE_BYTES:
                raise ConfigError(f"{self._flag} is larger than {MAX_FILE_BYTES} bytes")
            content = tomllib.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._flag} cannot be read: {getattr(error, 'strerror', 'it is not UTF-8')}") from None
        except ValueError as error:  # a number of thousands of digits is no TOMLDecodeError
            raise ConfigError(f"{self._flag} is not valid TOML: {error}") from None
        except RecursionError:
            raise ConfigError(f"{self._flag} is not valid TOML: it is nested too deeply") from None
        warn_of_open_file(self._flag, status.st_mode)
        return self._checked(_entries(content, self._flag))

    def _checked(self, entries: list[_Entry]) -> KeyFile:
        keys: dict[bytes, ApiKey] = {}
        quotas = dict(self._quotas)
        for number, entry in enumerate(entries, 1):
            where = f"{self._flag}: [[key]] {number}"
            if entry.digest in keys:
                raise ConfigError(f"{where} has the same hash as another; leave one out")
            if entry.digest in self._permanent:
                raise ConfigError(f"{where} has the same key as --api-key or --admin-api-key; make another")
            keys[entry.digest] = entry.key
            quota = Quota(entry.requests, entry.tokens_per_minute)
            if quota == Quota():
                continue
            if not entry.tenant:
                raise ConfigError(f"{where} has limits without a tenant; add tenant = NAME")
            if quotas.setdefault(entry.tenant, quota) != quota:
                raise ConfigError(f"{where} contradicts other limits of the tenant {entry.tenant}; give them once")
        return KeyFile(keys, quotas)

    async def follow(self, on_change: Callable[[KeyFile], None]) -> None:
        """Read the file whenever it changes, for ever. After an error, what was read before stays valid, and the file
        is read again until that works: the error may be of this process, such as too many open files.
        """
        problem = ""
        while True:
            await asyncio.sleep(POLL_S)
            is_changed = self._has_changed()
            if not (is_changed or problem):
                continue
            try:
                content = await asyncio.to_thread(self.read)
                on_change(content)
            except (
                Exception
            ) as error:  # also of a thread that cannot be started: keys that are taken back must be noticed
                reason = str(error) if isinstance(error, ConfigError) else f"{self._flag} cannot be read: {error}"
                if is_changed or reason != problem:
                    log.error("%s; the keys read before stay valid", reason)
                problem = reason
            else:
                problem = ""
                log.info("%s has changed: %d keys are valid", self._flag, len(content.keys))

    def _has_changed(self) -> bool:
        try:
            signature = _signature(os.stat(self._path))
        except OSError:
            signature = ()
        is_changed, self._signature = signature != self._signature, signature
        return is_changed


def _signature(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _entries(content: dict[str, Any], flag: str) -> list[_Entry]:
    tables = content.pop("key", [])
    if content or not isinstance(tables, list):
        raise ConfigError(f"{flag} must consist of [[key]] tables; {next(iter(content), 'key')} is not one")
    entries = []
    for number, table in enumerate(tables, 1):
        try:
            entries.append(msgspec.convert(table, _Entry))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{flag}: [[key]] {number}: {_without_pattern(str(error))}") from None
    return entries


def _without_pattern(message: str) -> str:
    """msgspec's complaint, with words for a regular expression."""
    if "matching regex" not in message:
        return message.replace("`", "").replace(" - at $.", ": ")
    if "$.hash" in message:
        return f"hash must be {HASHED} and 64 hexadecimal digits, not the key itself"
    return "tenant must have 1 to 128 of the characters A-Z a-z 0-9 . _ @ / + -"
