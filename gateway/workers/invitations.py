"""Asks the nodes of --prefill and --decode to register with this gateway, for as long as it lives.

A node that was started with ``--gateway listed`` admits the gateway's key where it listens for decode nodes. The
gateway must know which key the node has, and its folder of keys does not say at which address a key is used: so it
tries one after the other.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import zmq

from common.config.shared import Role
from common.errors import ConfigError
from common.wire.address import zmq_endpoint
from common.wire.curve import CurveKeys
from common.wire.mailbox import HandshakeFailure, Mailbox
from common.wire.messages import Invite, Ping, Refused

log = logging.getLogger(__name__)

#: ZMQ's sockets of each listed node: one for messages, and two for the events of its connection.
SOCKETS_PER_NODE = 3
TICK_S = 0.5
#: How often the next key of a node is tried, and for how many nodes at a time: to dial takes some tenths of a
#: millisecond.
SEARCH_S, MAX_SEARCHES = 0.05, 8
#: How long a node may have no connection before the log names it.
UNREACHED_S = 10.0
#: Ticks between two invitations. A node forgets a gateway that has said nothing for ten seconds.
TICKS_PER_INVITATION = 4

#: Why a node does not answer a handshake. It answers none while it loads its model.
UNKNOWN_KEY = (
    "it has no key that the folder nodes in --keys of this gateway permits, or is not a node of Baton, or is still "
    "loading its model"
)
NO_HANDSHAKE = (
    "it has keys and this gateway has none, or it is not a node of Baton, or is still loading its model; give both "
    "--keys, or neither"
)


def raise_socket_limit(context: "zmq.Context[Any]", num_nodes: int) -> None:
    """Raise a context's limit of sockets by those of ``num_nodes`` listed nodes, and of one that is dialled again.

    The default suffices for about 340 nodes. Called before the context has a socket.
    """
    num_sockets = context.get(zmq.MAX_SOCKETS) + SOCKETS_PER_NODE * (num_nodes + 1)
    context.set(zmq.MAX_SOCKETS, min(num_sockets, context.get(zmq.SOCKET_LIMIT)))


class Invitations:
    """Invites the nodes that this gateway lists.

    Args:
        nodes: roles of the listed nodes, by address.
        keys: of the gateway; None: connections are neither encrypted nor authenticated.
        address: ``host:port`` at which nodes reach this gateway.

    Raises ConfigError: this process cannot have the sockets of all listed nodes.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        incarnation: str,
        nodes: Mapping[str, Role],
        *,
        keys: CurveKeys | None,
        address: str,
    ) -> None:
        self._handle: asyncio.TimerHandle | None = None
        self._num_searches = 0  # since the last turn in which all nodes were visited
        self._nodes: list[_ListedNode] = []
        for node, role in nodes.items():
            try:
                self._nodes.append(_ListedNode(context, incarnation, node, Invite(role, address), keys))
            except zmq.ZMQError as error:
                self.close()
                raise ConfigError(
                    f"--{role} {node}: cannot dial it, with {len(nodes)} nodes listed: {error.strerror or error}; list "
                    "fewer, or raise the limit of open files (ulimit -n)"
                ) from error

    def start(self) -> None:
        if self._nodes:
            self._tick()

    def _tick(self) -> None:
        """Visit all nodes, or between two such turns those of which a key is sought."""
        self._handle = asyncio.get_running_loop().call_later(SEARCH_S, self._tick)
        if self._num_searches:
            self._num_searches -= 1
            due = [node for node in self._nodes if node.is_searching][:MAX_SEARCHES]
        else:
            self._num_searches = round(TICK_S / SEARCH_S) - 1
            due = self._nodes
        for node in due:
            try:
                node.tick()
            except zmq.ZMQError as error:  # this process has no descriptor left, for example; the next turn tries again
                node.say(f"{error.strerror or error}")

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        for node in self._nodes:
            node.close()


class _ListedNode:
    """The connection to one listed node.

    Args:
        address: ``host:port`` at which the node listens.
    """

    def __init__(
        self, context: "zmq.Context[Any]", incarnation: str, address: str, invite: Invite, keys: CurveKeys | None
    ) -> None:
        self._context = context
        self._incarnation = incarnation
        self._address = address
        self._invite = invite
        self._keys = keys
        self._candidates = [] if keys is None else list(keys.permitted)  # public keys that the node may have
        self._tried = 0  # the number of the candidate that is tried
        self._ticks_left = 0  # until the next invitation
        self._is_connected = False
        self._sought_at = time.monotonic()  # since when there has been no connection
        self._said = ""  # the problem that was logged last
        self._mailbox = self._dial(0)

    @property
    def is_searching(self) -> bool:
        """Whether some of the keys that the node may have are left to try, after the first."""
        return self._tried > 0 and not self._is_connected

    def tick(self) -> None:
        """Follow the connection, and send an invitation if one is due."""
        events = self._mailbox.connection_events()
        if events.connected:
            self._is_connected, self._ticks_left, self._said = True, 0, ""
            if self._candidates:  # this key is tried first after the connection was lost
                self._candidates.insert(0, self._candidates.pop(self._tried))
                self._tried = 0
            log.info("asking the %s node at %s to register", self._invite.role, self._address)
        elif events.failure is not None:
            self._on_failure(events.failure)
        elif events.disconnected:
            self._is_connected, self._sought_at = False, time.monotonic()
        for envelope in self._mailbox.receive():
            if isinstance(envelope.message, Refused):
                self.say(envelope.message.reason)
        if not self._is_connected:
            if not self._said and time.monotonic() - self._sought_at > UNREACHED_S:
                self.say(f"there has been no connection for {UNREACHED_S:g} s; is it running, and is this its address?")
            return
        if self._ticks_left == 0:
            self._mailbox.send(self._invite)
        self._ticks_left = (self._ticks_left - 1) % TICKS_PER_INVITATION

    def _on_failure(self, failure: HandshakeFailure) -> None:
        """Try the next key, unless the node has the one that was tried."""
        self._is_connected = False
        if failure is HandshakeFailure.KEY:
            self.say("it admits no gateway: start it with --gateway listed")
            return
        if self._tried + 1 >= len(self._candidates):
            self.say(UNKNOWN_KEY if self._candidates else NO_HANDSHAKE)
        if len(self._candidates) > 1:
            tried = (self._tried + 1) % len(self._candidates)
            before, self._mailbox = self._mailbox, self._dial(tried)
            self._tried = tried
            before.close()

    def _dial(self, tried: int) -> Mailbox:
        curve = None if self._keys is None else self._keys.client(self._candidates[tried])
        accepts = Refused | Ping
        return Mailbox(self._context, self._incarnation, accepts, connect=zmq_endpoint(self._address), curve=curve)

    def say(self, problem: str) -> None:
        if problem != self._said:
            self._said = problem
            log.error("cannot ask the node of --%s at %s to register: %s", self._invite.role, self._address, problem)

    def close(self) -> None:
        self._mailbox.close()
