"""Which values of the header ``Host`` are answered.

A page of any site can make its own name stand for 127.0.0.1, and is then, for the browser, of the same origin as the
gateway (DNS rebinding). Its requests still carry that name in ``Host``.
"""

import ipaddress
import re
from collections.abc import Iterable

from common.wire.address import is_loopback

#: Allows every host.
ANY = "*"
#: Values remembered as allowed, so that a request costs one look-up, and their length: a name and a port have 259.
MAX_KNOWN, MAX_LENGTH = 1024, 259
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{0,5})?")


class AllowedHosts:
    """Addresses and ``localhost`` are always allowed: no other site can make them stand for something else.

    Args:
        names: further hosts, with any port; ``*.example.com`` stands for all below it, ``*`` for all.
    """

    def __init__(self, names: Iterable[str]) -> None:
        names = [name.lower() for name in names]
        self._allows_any = ANY in names
        self._names = frozenset(names) | {"localhost"}
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._known: set[bytes] = set()

    def allows(self, value: bytes) -> bool:
        """Whether requests with this value of ``Host`` are answered."""
        if value in self._known:
            return True
        is_allowed = self._is_allowed(value)
        if is_allowed and len(value) <= MAX_LENGTH and len(self._known) < MAX_KNOWN:
            self._known.add(value)
        return is_allowed

    def _is_allowed(self, value: bytes) -> bool:
        found = _HOST.fullmatch(value.decode("latin-1"))
        if found is None:
            return False
        name = found[1].lower().removesuffix(".")
        if self._allows_any or name in self._names or name.endswith(self._suffixes):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def allowed_hosts(names: Iterable[str], bound_to: str) -> AllowedHosts:
    """As configured; without names, every host is allowed unless the gateway listens on loopback alone."""
    return AllowedHosts(names or (() if is_loopback(bound_to) else (ANY,)))
