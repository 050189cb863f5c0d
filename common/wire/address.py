"""Addresses as users name them: taken apart, and whether other machines can reach them."""

import ipaddress

from common.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether an address (or the name localhost) can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def host_and_port(text: str, flag: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` taken apart.

    Raises:
        ConfigError: names the flag.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{flag} must be HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


def in_url(host: str) -> str:
    """A host as it is written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def check_brackets(flag: str, host: str) -> None:
    if host.startswith("["):
        raise ConfigError(f"{flag} {host} is an address without a port, which has no brackets: {host.strip('[]')}")


def check_reach(flag: str, host: str, is_insecure: bool, remedy: str = "") -> None:
    check_brackets(flag, host)
    if not is_loopback(host) and not is_insecure:
        raise ConfigError(
            f"{flag} {host} can be reached from other machines, and nothing there is authenticated: "
            f"{remedy}accept that with --insecure"
        )
