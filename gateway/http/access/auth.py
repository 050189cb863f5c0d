"""Authentication: API keys, what each allows, and the header that names a tenant.

Keys are kept as hashes under a secret of this process, so the duration of a look-up reveals nothing about a key.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.errors import ErrorCode, RequestError

HEADER = "x-baton-tenant"
TENANT = re.compile(r"[A-Za-z0-9._@/+-]{1,128}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What a key allows.

    Attributes:
        tenant: whose requests these are; empty for none.
        is_admin: it allows what changes the state of others.
        expires_at: Unix time from which on it is refused; None for never.
    """

    tenant: str = ""
    is_admin: bool = False
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as its key or the tenant header names it.

    Attributes:
        tenant: empty for none.
        is_admin: may change the state of others.
    """

    tenant: str
    is_admin: bool

    @property
    def scope(self) -> str | None:
        """The tenant whose requests the caller may change; empty for those without a tenant, None for all."""
        return None if self.is_admin else self.tenant


class Authenticator:
    """Finds the caller of a request from its headers, whose names are in lower case.

    A key comes as a bearer token, as in OpenAI's API, or in ``x-api-key``, as in Anthropic's. ``Bearer`` may be written
    in any case (RFC 9110, section 11.1). With neither an admin key nor a file of keys, callers without a tenant are
    admins.

    Args:
        permanent: keys that stay for the life of the process, by their SHA-256 digest.
        is_header_taken: the header ``x-baton-tenant`` names the tenant.
        unix_time: tells which keys have expired.

    Attributes:
        needs_key: requests to most paths need a key.
        has_keys: callers may have keys, whether or not these are needed.
    """

    def __init__(
        self,
        permanent: Mapping[bytes, ApiKey],
        *,
        is_header_taken: bool = False,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._secret = secrets.token_bytes(32)
        self._permanent = dict(permanent)
        self._is_header_taken = is_header_taken
        self._unix_time = unix_time
        self._load(self._permanent)
        self.needs_key = any(not key.is_admin for key in self._permanent.values())
        self._is_admin_by_key = any(key.is_admin for key in self._permanent.values())
        self.has_keys = self.needs_key or self._is_admin_by_key

    def replace_keys(self, keys: Mapping[bytes, ApiKey]) -> None:
        """Replace all keys but the permanent ones. From now on requests need a key, even if there is none."""
        self._load({**keys, **self._permanent})
        self.needs_key = self.has_keys = self._is_admin_by_key = True

    def _load(self, keys: Mapping[bytes, ApiKey]) -> None:
        self._keys = {self._tag(digest): key for digest, key in keys.items()}

    def caller(self, headers: Mapping[str, str], *, is_open: bool = False) -> Caller:
        """The caller of a request.

        Args:
            is_open: the path needs no key; a wrong tenant header is refused all the same.

        Raises RequestError: no valid key, or a tenant header that is disabled, invalid or of another tenant.
        """
        key = self._key(headers) if self._keys and not is_open else None
        if key is None and self.needs_key and not is_open:
            message = "no valid API key: send it as Authorization: Bearer KEY, or as x-api-key: KEY"
            raise RequestError(ErrorCode.AUTHENTICATION, message)
        tenant = self._named_tenant(headers, "" if key is None else key.tenant)
        is_admin = key is not None and key.is_admin if self._is_admin_by_key else not tenant
        return Caller(tenant, is_admin)

    def check_admin(self, caller: Caller) -> None:
        """Raises RequestError: the caller may not change the state of others."""
        if caller.is_admin:
            return
        if self.needs_key:  # so the caller has sent a valid one
            raise RequestError(ErrorCode.PERMISSION_DENIED, "this needs an admin key (the gateway's --admin-api-key)")
        raise RequestError(ErrorCode.AUTHENTICATION, "this needs the admin key: send it as Authorization: Bearer KEY")

    def _named_tenant(self, headers: Mapping[str, str], by_key: str) -> str:
        named = headers.get(HEADER)
        if named is None:
            return by_key
        if not self._is_header_taken:
            message = f"{HEADER}: not accepted here; leave it out, or start the gateway with --tenant-header"
            raise RequestError(ErrorCode.INVALID_REQUEST, message, param=HEADER)
        if not TENANT.fullmatch(named):
            message = f"{HEADER}: a tenant's name has 1 to 128 of the characters A-Z a-z 0-9 . _ @ / + -"
            raise RequestError(ErrorCode.INVALID_REQUEST, message, param=HEADER)
        if by_key and named != by_key:
            raise RequestError(ErrorCode.AUTHENTICATION, f"{HEADER}: the API key belongs to another tenant")
        return named

    def _key(self, headers: Mapping[str, str]) -> ApiKey | None:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        for given in (bearer if scheme.lower() == "bearer" else None, headers.get("x-api-key")):
            if given is not None:
                key = self._keys.get(self._tag(hashlib.sha256(given.encode(errors="surrogateescape")).digest()))
                if key is not None and (key.expires_at is None or self._unix_time() < key.expires_at):
                    return key
        return None

    def _tag(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")
