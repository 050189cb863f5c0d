"""Parses addresses, and checks whether other machines can reach them."""

import errno
import ipaddress
import os
import re

from common.errors import ConfigError, reason_of

_ZONE = re.compile(r"%.*[^A-Za-z0-9_.-]")  # of an IPv6 address, which zmq would not take
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
_PORT = re.compile(r"[0-9]{1,5}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address (or the name localhost)."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Whether an address to listen on means every address of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def is_address(text: str) -> bool:
    """Whether this is an address of IPv4 or, without brackets, of IPv6, to which a socket may connect."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return _ZONE.search(text) is None


def is_host(text: str) -> bool:
    """Whether this is a name, or an address of IPv4 or, in brackets or not, of IPv6, to which a socket may connect."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return is_address(bare) or _NAME.fullmatch(text) is not None


def host_and_port(text: str, flag: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``. Raises ConfigError: ``text`` is neither; the message names ``flag``."""
    host, _, port = text.rpartition(":")
    if not is_host(host) or _PORT.fullmatch(port) is None or not 0 < int(port) < 65536:
        raise ConfigError(f"{flag} must be HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


def in_url(host: str) -> str:
    """Return a host as it is written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def zmq_endpoint(address: str) -> str:
    """Return what ZMQ takes for ``host:port``, to listen there or to dial it.

    ZMQ tries one address of a name alone. That of ``localhost`` is ::1 on many machines, while processes listen on
    127.0.0.1 unless they are told otherwise; so ``localhost`` is 127.0.0.1 here.
    """
    host, _, port = address.rpartition(":")
    return f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{port}"


def cannot_bind(host_flag: str, host: str, port_flag: str, port: int, error: Exception) -> ConfigError:
    """The error of an address at which a process cannot listen: what an OSError or a ZMQError says, and the remedy."""
    number = getattr(error, "errno", None) or 0
    wrong = port_flag if number in (errno.EADDRINUSE, errno.EACCES) else host_flag
    # Not ``strerror``, in which asyncio and ZeroMQ repeat the address.
    reason = os.strerror(number).lower() if number in errno.errorcode else reason_of(error)
    return ConfigError(f"cannot bind {host_flag} {host} {port_flag} {port}: {reason}; choose another with {wrong}")


def check_host(flag: str, host: str) -> None:
    """Raises ConfigError: the address is empty, or in brackets although it has no port."""
    if not host:  # as of a variable that is not set; a socket would listen on every address
        raise ConfigError(f"{flag} is empty: give an address, such as 127.0.0.1 for this machine alone")
    if host.startswith("["):
        raise ConfigError(f"{flag} {host} is an address without a port; write it without brackets: {host.strip('[]')}")


def check_reach(flag: str, host: str, is_insecure: bool, remedy: str) -> None:
    """Raises ConfigError: other machines can reach ``host``, and --insecure does not allow it."""
    check_host(flag, host)
    if not is_loopback(host) and not is_insecure:
        raise ConfigError(
            f"{flag} {host} can be reached from other machines without authentication: {remedy}allow it with --insecure"
        )
