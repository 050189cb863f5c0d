"""Which network devices UCX may use: those of the interface on which this node receives pages.

Without a choice, UCX listens on every interface that it finds. ``UCX_NET_DEVICES`` is its own variable for this choice,
and one that is set already is left alone: a host with several RDMA devices may want pages on all of them.
"""

import array
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
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES, _MAX_ADDRESSES = struct.calcsize("16sP16x"), 4096


def restrict_to(host: str) -> None:
    """Let UCX use only the devices of the interface that has this address, before it starts. An address that means all
    of them restricts nothing.
    """
    if VARIABLE in os.environ or is_unspecified(host):
        return
    devices = devices_of(host)
    if not devices:
        log.warning(
            "no interface other than lo has the address %s of pages: UCX uses all interfaces, unless %s is set",
            host,
            VARIABLE,
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
        wanted = [ipaddress.ip_address(str(found[4][0]).partition("%")[0]) for found in socket.getaddrinfo(host, None)]
    except (OSError, ValueError):
        return ""
    # Other machines reach an address of ``lo`` through other interfaces, and there UCX would offer them 127.0.0.1.
    having = ((name, address) for address in wanted for name in _interfaces_with(address))
    return next((name for name, address in having if name != "lo" or address.is_loopback), "")


def _interfaces_with(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[str]:
    """The interfaces of this machine that have this address, be it their first one or another."""
    if address.version == 6:
        with contextlib.suppress(OSError):
            lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
            return [name for digits, *_, name in lines if bytes.fromhex(digits) == address.packed]
        return []
    with contextlib.suppress(OSError):
        entries = [(entry[:16].rstrip(b"\0"), entry[20:24]) for entry in _ipv4_entries()]
        return [os.fsdecode(label).partition(":")[0] for label, packed in entries if packed == address.packed]
    return []


def _ipv4_entries() -> list[bytes]:
    """A struct ifreq for each address. Its name is the label of the address, such as ``eth0`` or ``eth0:1``."""
    room = array.array("B", bytes(_MAX_ADDRESSES * _IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iP", len(room), room.buffer_info()[0]))
    num_bytes: int = struct.unpack("iP", answer)[0]
    return [room[at : at + _IFREQ_BYTES].tobytes() for at in range(0, num_bytes, _IFREQ_BYTES)]
