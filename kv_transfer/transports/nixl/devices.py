"""Which network devices UCX may use: those of the interface on which this node receives pages.

Without a choice, UCX listens on every interface that it finds. ``UCX_NET_DEVICES`` is its own variable for this choice,
and one that is set already is left alone: a host with several RDMA devices may want pages on all of them.
"""

import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import struct
from pathlib import Path

from common.wire.address import is_loopback, is_unspecified

log = logging.getLogger(__name__)

VARIABLE = "UCX_NET_DEVICES"
INFINIBAND = Path("/sys/class/infiniband")
_SIOCGIFADDR = 0x8915


def restrict_to(host: str) -> None:
    """Let UCX use only the devices of the interface that has this address, before it starts. An address that means all
    of them restricts nothing.
    """
    if VARIABLE in os.environ or is_unspecified(host):
        return
    devices = devices_of(host)
    if not devices:
        log.warning(
            "no interface has the address %s of pages: UCX uses every interface, unless %s is set", host, VARIABLE
        )
        return
    if len(devices) == 1 and not is_loopback(host) and any(INFINIBAND.glob("*")):
        log.warning(
            "no RDMA device was found behind %s, with the address %s of pages, and this machine has some: UCX uses "
            "every device, unless %s is set",
            devices[0],
            host,
            VARIABLE,
        )
        return
    os.environ[VARIABLE] = ",".join(devices)
    log.info("UCX uses %s, with the address %s; %s chooses others", os.environ[VARIABLE], host, VARIABLE)


def devices_of(host: str, net: Path = Path("/sys/class/net")) -> list[str]:
    """Return the names by which UCX knows the interface with an address, and the RDMA devices behind it; none if no
    interface has it.
    """
    interface = _interface_of(host)
    if not interface:
        return []
    return [interface, *sorted({device for name in _with_lower(net, interface) for device in _rdma_of(net / name)})]


def _with_lower(net: Path, interface: str) -> list[str]:
    """An interface, and those on which it is built, as a bond, a VLAN or a bridge is."""
    found = [interface]
    for name in found:  # which grows meanwhile
        links = sorted(path.name.removeprefix("lower_") for path in (net / name).glob("lower_*"))
        found += [link for link in links if link not in found]
    return found


def _rdma_of(folder: Path) -> list[str]:
    """The RDMA devices of an interface, each with the port that the interface has."""
    try:
        port = int((folder / "dev_port").read_text()) + 1
    except (OSError, ValueError):
        port = 1
    return [f"{path.name}:{port}" for path in (folder / "device" / "infiniband").glob("*")]


def _interface_of(host: str) -> str:
    try:
        wanted = {ipaddress.ip_address(str(found[4][0]).partition("%")[0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):
        return ""
    return next((name for name, address in _addresses() if address in wanted), "")


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """The interfaces of this machine with their addresses."""
    found: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append((name, ipaddress.IPv4Address(answer[20:24])))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.append((name, ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found
