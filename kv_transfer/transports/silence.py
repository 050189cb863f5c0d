"""Find TCP connections whose packets vanish, long before the kernel gives them up.

Both UCX and our own TCP leave it to the kernel to give a connection up whose packets are not answered, which takes from
half a minute to many. A connection that is found here counts as broken, as if the network had reset it, so that the
pair goes on by the usual way, and with the usual fence.

How long a write takes says nothing, since a link may be slow. What counts is the kernel's view of each connection:
several retransmissions without an acknowledgement in between, while the same host answers over another connection. A
peer that is stopped, or slow, still acknowledges.
"""

import contextlib
import math
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

#: Seconds for which something must be under way before connections are looked at.
LATE_S = 0.5
#: Seconds for which a connection must be silent while another one with its host is not, and without another one.
SILENT_S, ALONE_S = 0.8, 3.0
#: Seconds between two looks while something is late.
LOOK_PAUSE_S = 0.1
#: The reason for the break of a pair whose packets vanish.
LOST = "packets over it are lost without an error"
#: Retransmissions in a row: with 1 % of the packets lost, two of them and the first packet are lost once in a million.
NUM_RETRANSMISSIONS = 2
#: Seconds by which the last answer over another connection must be later than that over the silent one.
LATER_S = 0.3
_TCP_INFO = struct.Struct("=8B13I")  # the beginning of ``struct tcp_info`` in linux/tcp.h
_RETRANSMITS, _UNACKED, _LAST_DATA, _LAST_ACK = 2, 12, 19, 20


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """What the kernel knows of a TCP connection of this process.

    Attributes:
        host, port: of the other end.
        own_port: of this end.
        num_retransmissions: since the last acknowledgement.
        is_waiting: something that was sent has not been acknowledged.
        unacknowledged_s: since the last acknowledgement came.
        unheard_s: since an acknowledgement or data came.
    """

    host: str
    port: int
    own_port: int
    num_retransmissions: int
    is_waiting: bool
    unacknowledged_s: float
    unheard_s: float

    @property
    def is_suspect(self) -> bool:
        """Whether it is worth comparing with others of its host."""
        return self.is_waiting and self.num_retransmissions >= NUM_RETRANSMISSIONS

    @property
    def ends(self) -> tuple[str, int, int]:
        """What tells it apart from other connections of this process."""
        return self.host, self.port, self.own_port


def is_silent(connection: ConnectionInfo, others: Sequence[ConnectionInfo], waited_s: float) -> bool:
    """Whether packets of a connection vanish.

    Args:
        others: connections of other kinds with the same host.
        waited_s: for how long something has been under way; before, the connection may have been idle.
    """
    if not connection.is_suspect:
        return False
    silent_s = min(connection.unacknowledged_s, waited_s)
    if not others:
        return silent_s >= ALONE_S
    # Where packets wait in a long queue, as on a slow link, those of other connections are retransmitted, too.
    latest_s = min((other.unheard_s for other in others if not other.num_retransmissions), default=math.inf)
    return silent_s >= max(SILENT_S, latest_s + LATER_S)


def is_waiting(sock: socket.socket) -> bool:
    """Whether something that was sent over a connection has not been acknowledged."""
    info = _info_of(sock)
    return info is not None and info.is_waiting


def has_silent(socks: Sequence[socket.socket], waited_s: float) -> bool:
    """Whether one of these connections with one host is silent. Others of their pair are no proof that it answers.

    Args:
        waited_s: as for ``is_silent``.
    """
    ours = [info for info in map(_info_of, socks) if info is not None]
    suspects = [info for info in ours if info.is_suspect]
    if not suspects:
        return False
    ends = {info.ends for info in ours}
    others = []
    for info, sock in _connections():
        sock.close()
        if info.host == suspects[0].host and info.ends not in ends:
            others.append(info)
    return any(is_silent(info, others, waited_s) for info in suspects)


def shut_silent(is_ours: Callable[[ConnectionInfo], bool], waited_s: float) -> int:
    """Shut silent connections of this process down.

    Args:
        is_ours: whether a connection is to be looked at; the others show whether its host answers.
        waited_s: as for ``is_silent``.

    Returns:
        How many there were.
    """
    others: list[ConnectionInfo] = []
    num_shut = 0
    with contextlib.ExitStack() as stack:
        ours: list[tuple[ConnectionInfo, socket.socket]] = []
        for info, sock in _connections():
            if is_ours(info):
                ours.append((info, stack.enter_context(sock)))
            else:
                others.append(info)
                sock.close()
        for info, sock in ours:
            if is_silent(info, [other for other in others if other.host == info.host], waited_s):
                num_shut += 1
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
    return num_shut


def _connections() -> Iterator[tuple[ConnectionInfo, socket.socket]]:
    """The TCP connections of this process, each with a duplicate of its descriptor: the number of the descriptor itself
    may stand for something else at any time.
    """
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # no descriptor is left to look with
        return
    for name in names:
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            sock = socket.socket(fileno=duplicate)
        except OSError:  # no socket any more
            os.close(duplicate)
            continue
        info = _info_of(sock)
        if info is None:
            sock.close()
        else:
            yield info, sock


def _info_of(sock: socket.socket) -> ConnectionInfo | None:
    """What the kernel knows of a socket; None: it is not connected by TCP."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        (host, port, *_), own_port = sock.getpeername(), sock.getsockname()[1]
        values = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    except (OSError, struct.error):
        return None
    last_data_s, last_ack_s = values[_LAST_DATA] / 1_000, values[_LAST_ACK] / 1_000
    host = host.removeprefix("::ffff:").partition("%")[0]  # without the interface of a link-local address
    is_waiting = values[_UNACKED] > 0
    return ConnectionInfo(
        host, port, own_port, values[_RETRANSMITS], is_waiting, last_ack_s, min(last_data_s, last_ack_s)
    )
