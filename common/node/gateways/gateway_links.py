"""The connections of a node to all gateways of its directory, and how the gateways share what the node runs at once."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import zmq

from common.clock import Clock
from common.discovery.gateway_directory import MAX_GATEWAYS, GatewayDirectory
from common.node.endpoint import ControlEndpoint
from common.node.gateways.credit import Credit
from common.node.gateways.gateway_link import GatewayLink, total_load
from common.reminder import Reminder
from common.wire.mailbox import Mailbox
from common.wire.messages import (
    FromGateway,
    Heartbeat,
    HeartbeatAck,
    Message,
    PairState,
    Peer,
    Register,
    Registered,
)

log = logging.getLogger(__name__)

#: Seconds after which a gateway that has refused this node is dialled again. Its reason may have gone: it may have
#: noticed meanwhile that an earlier start of this node is gone, or another gateway may have been started there.
REFUSED_S = 30.0
UNDIALLED_S = 5.0  # after which a gateway that could not be dialled is tried again


class Refusal(NamedTuple):
    """Why a gateway has refused this node, and when it is dialled again."""

    reason: str
    until: float


class GatewayLinks:
    """One link to each gateway that the directory names, oldest first.

    Args:
        register: makes the message that registers this node.
        poller: is told of the sockets.
        max_running: requests that the node runs at once.

    Attributes:
        refused: the reason of the last gateway, if all have refused this node since they accepted it last; else None.
        is_shared: whether the node may have several gateways.
    """

    def __init__(
        self,
        directory: GatewayDirectory,
        endpoint: ControlEndpoint,
        *,
        register: Callable[[], Register],
        clock: Clock,
        poller: zmq.Poller,
        max_running: int,
    ) -> None:
        self._directory = directory
        self._endpoint = endpoint
        self._register = register
        self._clock = clock
        self._poller = poller
        self._links: list[GatewayLink] = []
        self._refusals: dict[str, Refusal] = {}  # by the addresses of gateways that have not accepted this node since
        self._duplicates: set[str] = set()  # further addresses of gateways that this node reaches at another one
        self._reminder = Reminder(clock.now())  # that there is none
        self._dial_again_at: float | None = None  # until then no gateway is dialled; None: all dials have succeeded
        self.is_shared = not directory.is_fixed or len(directory.addresses()) != 1
        self._credit = Credit(max_running) if self.is_shared else None
        self.refused: str | None = None
        self._follow()

    def __iter__(self) -> Iterator[GatewayLink]:
        return iter(self._links)

    def __contains__(self, link: object) -> bool:
        return link in self._links

    @property
    def only(self) -> GatewayLink | None:
        """The link to the one gateway; None if there are several, or none."""
        return self._links[0] if len(self._links) == 1 else None

    @property
    def addresses(self) -> str:
        """Addresses of the gateways that this node dials, separated by commas."""
        return ",".join(link.address for link in self._links)

    @property
    def is_registered(self) -> bool:
        """Whether a gateway has accepted this node."""
        return any(link.is_registered for link in self._links)

    @property
    def waits_for(self) -> str:
        """What a node that no gateway has accepted waits for; empty for another one."""
        if self.is_registered:
            return ""
        if not self._links:
            return f"the address of a gateway: none is known of {self._directory.description}"
        is_dialling = all(link.is_dialling for link in self._links)
        return f"{'a connection to ' if is_dialling else ''}the gateway at {self.addresses}"

    @property
    def connected(self) -> list[str]:
        """Incarnations of the connected gateways: they may send requests, or are registering this node as it was when
        the connection came up. One that has not answered yet has an empty incarnation."""
        return [link.incarnation for link in self._links if not link.is_dialling]

    @property
    def have_acknowledged(self) -> bool:
        """Whether every gateway has (``GatewayLink.has_acknowledged``)."""
        return all(link.has_acknowledged for link in self._links)

    @property
    def prefill_nodes(self) -> tuple[Peer, ...]:
        """Prefill nodes that any gateway knows."""
        return tuple({peer.incarnation: peer for link in self._links for peer in link.prefill_nodes}.values())

    def mailboxes(self) -> list[Mailbox]:
        return [link.mailbox for link in self._links]

    def remind(self, now: float) -> None:
        """Say now and then that a gateway is missing."""
        for link in self._links:
            link.remind(now)
        if not self._links and self._reminder.is_due(now):
            log.info("still waiting for %s", self.waits_for)

    # ---- which gateways ---------------------------------------------------------------------------------------------

    def follow_directory(self) -> None:
        """Dial gateways that are new in the directory, or that refused this node or could not be dialled a while ago,
        and leave those that are not in it.

        One that has accepted this node stays: the directory may be wrong for a time, as etcd drops what it has not
        heard from.
        """
        if self._refusals or self._dial_again_at is not None or not self._directory.is_fixed:
            self._follow()

    def _follow(self) -> None:
        addresses = self._directory.addresses()
        for address in [address for address in self._refusals if address not in addresses]:
            del self._refusals[address]  # another gateway may come there
        for link in [link for link in self._links if not (link.address in addresses or link.is_registered)]:
            log.info("the gateway at %s is not announced any more", link.address)
            self._leave(link)
            self._duplicates.clear()  # one may be another address of this gateway
        now = self._clock.now()
        refusing = {address for address, refusal in self._refusals.items() if refusal.until > now}
        used = {link.address for link in self._links} | refusing | self._duplicates
        new = [address for address in addresses if address not in used]
        if self._dial_again_at is None or now >= self._dial_again_at:
            self._dial_again_at = None
            for address in new[: max(MAX_GATEWAYS - len(self._links), 0)]:
                self._dial(address)
        if addresses and not self._links and not new:
            self.refused = self._refusals[addresses[-1]].reason

    def leave_duplicates(self, link: GatewayLink, gateway: str) -> None:
        """Leave other links to a gateway that is heard over this one, which it answers on as the newest connection."""
        for other in [other for other in self._links if other is not link and other.incarnation == gateway]:
            log.error(
                "%s and %s are addresses of the same gateway; no longer using %s, name the gateway once",
                other.address,
                link.address,
                other.address,
            )
            self._duplicates.add(other.address)
            self._leave(other)

    def on_refused(self, link: GatewayLink, reason: str) -> None:
        """Leave a gateway that refuses this node, for a while; the node goes on while another one may take it."""
        if all(other is link or other.address in self._refusals for other in self._links):
            self.refused = reason
            return
        before = self._refusals.get(link.address)
        if before is None or before.reason != reason:
            log.error("the gateway at %s refuses this node; asking again later: %s", link.address, reason)
        self._refusals[link.address] = Refusal(reason, self._clock.now() + REFUSED_S)
        self._leave(link)

    def _dial(self, address: str) -> None:
        key = b"" if self._endpoint.keys is None else self._endpoint.keys.gateway
        try:
            mailbox = self._endpoint.dial(FromGateway, address, key)
        except zmq.ZMQError as error:  # this process has no descriptor left
            log.warning("cannot dial the gateway at %s, trying again later: %s", address, error.strerror or error)
            self._dial_again_at = self._clock.now() + UNDIALLED_S
            return
        self._links.append(GatewayLink(mailbox, address, self._register, self._clock, is_alone=not self.is_shared))
        for socket in mailbox.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def _leave(self, link: GatewayLink) -> None:
        self._links.remove(link)
        for socket in link.mailbox.sockets:
            self._poller.unregister(socket)
        link.mailbox.close()
        self.lost(link.incarnation)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def on_registered(self, link: GatewayLink, message: Registered) -> None:
        link.on_registered(message)
        self._refusals.pop(link.address, None)
        if self._credit is not None:
            self._credit.join(link.incarnation)

    def on_acknowledged(self, link: GatewayLink, message: HeartbeatAck) -> None:
        link.on_acknowledged(message)
        if self._credit is not None:
            self._credit.acknowledge(link.incarnation, message.demand)

    def lost(self, gateway: str) -> None:
        """A gateway process is gone, or not used any more: others may have its share."""
        if self._credit is not None:
            self._credit.leave(gateway)

    def send_to_all(self, message: Message) -> None:
        for link in self._links:
            link.send(message)

    def beat(self, heartbeat: Heartbeat, pairs: tuple[PairState, ...], in_flight: Mapping[str, int]) -> None:
        """Send each gateway a heartbeat, with its share of a shared node.

        Args:
            in_flight: requests by gateway, as ``RequestOwners.num_on_node`` counts them.
        """
        for link in self._links:
            if link.is_registered:
                share = None if self._credit is None else self._credit.offer(link.incarnation, in_flight)
                other_load = total_load(other.client_load for other in self._links if other is not link)
                link.beat(heartbeat, pairs, share, other_load)
