"""The connection of a node to one gateway, which it dials until it is stopped.

The node registers whenever the connection comes up.
"""

import logging
from collections.abc import Callable, Iterable

from msgspec import structs

from common.clock import Clock
from common.reminder import Reminder
from common.wire.mailbox import HandshakeFailure, Mailbox
from common.wire.messages import (
    ClientLoad,
    Heartbeat,
    HeartbeatAck,
    Message,
    OtherLoad,
    Pairs,
    PairState,
    Peer,
    PrefillNodes,
    Register,
    Registered,
)

log = logging.getLogger(__name__)

NO_LOAD = OtherLoad(0, 0)
REGISTRATION_S = 10.0  # in which a gateway must have answered a registration; the node then connects again
REMEDIES = {
    HandshakeFailure.KEY: "it does not permit the key of this node: give both --keys folders of one baton keygen, with "
    "the node's public key in the folder nodes of the gateway's",
    HandshakeFailure.PROTOCOL: "only one of the two has keys (start both with keys, or both with --insecure), or this "
    "is not the --control-port of a gateway of this release of Baton",
    HandshakeFailure.CLOSED: "the process there closes the connection, as a gateway does if its key is another one or "
    "only one of the two has keys (give both --keys folders of one baton keygen, or start both with --insecure), or if "
    "it is ending or overloaded",
}


class GatewayLink:
    """A node's connection to one gateway.

    Args:
        mailbox: connected to the gateway.
        address: ``host:port`` of its control socket.
        register: makes the message that registers this node.
        is_alone: the node has no other gateway.

    Attributes:
        incarnation: of the gateway process; empty while none has answered.
        is_registered, is_dialling: whether the gateway has accepted this node, and whether it is not even connected.
        heartbeat_s: seconds between two heartbeats that the gateway wants.
        prefill_nodes: the prefill nodes that the gateway knows.
        most_held_tokens: as the node registered with it last.
        other_load: what it was told last of the load of the other gateways.
        client_load: what clients ask of it, as it said last; nothing while it is not registered.
    """

    def __init__(
        self, mailbox: Mailbox, address: str, register: Callable[[], Register], clock: Clock, *, is_alone: bool
    ) -> None:
        self.mailbox = mailbox
        self.address = address
        self._register = register
        self._is_alone = is_alone
        self._clock = clock
        self._connected_at: float | None = None  # to a gateway that has not answered yet
        self._failures: set[HandshakeFailure] = set()  # logged since the last registration
        self._heard: tuple[float, float] = (0.0, 0.0)  # when the gateway sent its last instant, and when it came
        self._sent_pairs: tuple[PairState, ...] | None = None  # since the last registration
        self._reminder = Reminder(clock.now())
        self.incarnation = ""
        self.heartbeat_s = 1.0
        self._num_heartbeats = self._num_acks = self._num_acks_due = 0  # since the last registration
        self.is_registered = False
        self.is_dialling = True
        self.prefill_nodes: tuple[Peer, ...] = ()
        self.most_held_tokens = 0
        self.other_load = NO_LOAD
        self.client_load = ClientLoad()

    def send(self, *messages: Message) -> None:
        self.mailbox.send(*messages, target=self.incarnation)

    def register(self) -> None:
        """Register the node, for no request until the gateway knows its share, if it must share the node."""
        register = self._register()
        self.most_held_tokens = register.most_held_tokens
        self.send(structs.replace(register, share=None if self._is_alone else 0))
        self._num_heartbeats = 0  # those that follow are acknowledged after this registration
        self.other_load = NO_LOAD  # the gateway forgets it with this message, and hears the next after it

    def follow(self, now: float, loss_level: int) -> str:
        """Follow the connection. Return the incarnation of a gateway that was lost with it; empty if none was.

        A loss is logged at ``loss_level``.

        The connection may break and come up again several times between two calls. So what came before a call that
        registers the node is dropped: it may be of a process that has ended.
        """
        events = self.mailbox.connection_events()
        lost = ""
        if events.failure is not None:
            self._report_failure(events.failure)
        if events.disconnected:
            if events.failure is None:
                log.log(loss_level, "the gateway at %s is gone", self.address)
            lost, self.incarnation = self.incarnation, ""
            self.is_registered, self.is_dialling = False, True
            self.client_load = ClientLoad()
            self.prefill_nodes = ()
            self._reminder = Reminder(now)
            self._connected_at = None
        if events.connected:
            self.mailbox.discard_unread()  # what answers this registration comes later
            self._connected_at = now
            self.is_dialling = False
            self.register()
        elif self._connected_at is not None and now - self._connected_at > REGISTRATION_S:
            self._connected_at = None
            self.mailbox.redial()
        return lost

    def heard_from(self, sender: str) -> str:
        """A process has answered. Return the incarnation of another one whose address it has taken over, or ""."""
        before, self.incarnation = self.incarnation, sender
        self._connected_at = None
        return before if before != sender else ""

    def on_registered(self, message: Registered) -> None:
        self._failures.clear()
        if not self.is_registered:
            log.info("registered with the gateway at %s (start %d)", self.address, message.starts)
        self.is_registered = True
        self._sent_pairs = None
        self.heartbeat_s = message.heartbeat_s
        self._num_acks = self._num_acks_due = 0
        self._on_instant(message)

    def on_prefill_nodes(self, message: PrefillNodes) -> None:
        self.prefill_nodes = message.nodes

    def on_acknowledged(self, message: HeartbeatAck) -> None:
        self._num_acks += 1
        self.client_load = message.load
        self._on_instant(message)

    def expect_ack(self) -> None:
        """Let ``has_acknowledged`` ask for the answer to the next heartbeat."""
        self._num_acks_due = self._num_heartbeats + 1

    @property
    def has_acknowledged(self) -> bool:
        """The gateway has answered the heartbeat after ``expect_ack``, or knows this node no more."""
        return not self.is_registered or self._num_acks >= self._num_acks_due

    def _on_instant(self, message: Registered | HeartbeatAck) -> None:
        """Note the gateway's time, from which it estimates the offset between the clocks."""
        self._heard = (message.sent_at, self._clock.now())  # an instant of the turn may be earlier than it was sent

    def beat(
        self, heartbeat: Heartbeat, pairs: tuple[PairState, ...], share: int | None, other_load: ClientLoad
    ) -> None:
        """Send a heartbeat, and the pairs if they have changed.

        Args:
            share: of this gateway in what the node runs at once; None for all.
            other_load: what clients ask of the other gateways.
        """
        (gateway_sent_at, received_at), self._heard = self._heard, (0.0, 0.0)
        self._num_heartbeats += 1
        heard = {"gateway_sent_at": gateway_sent_at, "received_at": received_at}
        self.send(structs.replace(heartbeat, share=share, other_load=other_load, **heard))
        if pairs != self._sent_pairs:
            self._sent_pairs = pairs
            self.send(Pairs(pairs))

    def tell_other_load(self, load: OtherLoad) -> None:
        if load != self.other_load:
            self.other_load = load
            self.send(load)

    def remind(self, now: float) -> None:
        """Say now and then that the gateway is missing."""
        if self.is_registered or not self._reminder.is_due(now):
            return
        where = self.address
        if self.is_dialling:
            log.info("still waiting for the gateway at %s; start one, or name another with --gateway HOST:PORT", where)
        else:
            log.info("still waiting for the gateway at %s to answer: it is connected, and has not registered us", where)

    def _report_failure(self, failure: HandshakeFailure) -> None:
        """Log why the gateway cannot be reached: each cause once, since an attacker on the path can forge it."""
        if failure not in self._failures:
            self._failures.add(failure)
            log.error("cannot connect to --gateway %s: %s; trying again", self.address, REMEDIES[failure])


def total_load(loads: Iterable[ClientLoad]) -> ClientLoad:
    """What clients ask of several gateways together."""
    rows = [structs.astuple(load) for load in loads]
    return ClientLoad(*map(sum, zip(*rows, strict=True))) if rows else ClientLoad()
