"""The control connections of a decode node to the nodes that its pages come from, which it dials."""

import logging
from collections.abc import Iterator

import zmq

from common.errors import ConfigError, reason_of
from common.node.endpoint import ControlEndpoint
from common.wire.address import host_and_port
from common.wire.curve import KEY_BYTES
from common.wire.mailbox import Mailbox
from common.wire.messages import FromPrefill, Message, Peer

log = logging.getLogger(__name__)

NO_KEY = bytes(KEY_BYTES)  # no process has the secret of this public key


class PrefillMailboxes:
    """A mailbox for each node that was dialled, by its incarnation.

    Args:
        poller: is told of the sockets.

    Attributes:
        num_dropped, num_bytes_sent: of the mailboxes that are closed.
    """

    def __init__(self, endpoint: ControlEndpoint, poller: zmq.Poller) -> None:
        self._endpoint = endpoint
        self._poller = poller
        self._mailboxes: dict[str, Mailbox] = {}
        self._failed: list[str] = []  # nodes that could not be dialled
        self.num_dropped = self.num_bytes_sent = 0

    def mailboxes(self) -> list[Mailbox]:
        return list(self._mailboxes.values())

    def dial(self, peer: Peer) -> None:
        """Connect to a node, in place of any connection to it; if that fails, the node counts as lost."""
        self.hang_up(peer.incarnation)
        try:
            host_and_port(peer.address, "its address")
            mailbox = self._endpoint.dial(FromPrefill, peer.address, bytes.fromhex(peer.public_key) or NO_KEY)
        except (ConfigError, zmq.ZMQError) as error:  # an impossible address, or this process has no descriptor left
            log.warning("cannot dial %s: %s", peer.name, reason_of(error))
            self._failed.append(peer.incarnation)
            return
        self._mailboxes[peer.incarnation] = mailbox
        for socket in mailbox.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def hang_up(self, incarnation: str) -> None:
        """Close the connection to a node, if there is one."""
        mailbox = self._mailboxes.pop(incarnation, None)
        if mailbox is not None:
            for socket in mailbox.sockets:
                self._poller.unregister(socket)
            self.num_dropped += mailbox.dropped.total()
            self.num_bytes_sent += mailbox.num_bytes_sent
            mailbox.close()

    def send(self, incarnation: str, message: Message) -> None:
        """Send a message; one to a node without a connection is dropped."""
        mailbox = self._mailboxes.get(incarnation)
        if mailbox is not None:
            mailbox.send(message, target=incarnation)

    def receive(self) -> Iterator[tuple[str, Message]]:
        """What has arrived, with the sender's incarnation. A caller may not dial or hang up meanwhile."""
        for incarnation, mailbox in self._mailboxes.items():
            for envelope in mailbox.receive():
                if envelope.sender == incarnation:
                    yield incarnation, envelope.message

    def lost(self) -> list[str]:
        """The nodes whose connections have broken, or could not be made, since the last call."""
        failed, self._failed = self._failed, []
        return failed + [name for name, mailbox in self._mailboxes.items() if mailbox.connection_events().disconnected]
