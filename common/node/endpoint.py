"""The control plane's end in a node: its incarnation, its keys, the socket that it listens on, and dialling others."""

from dataclasses import dataclass
from typing import Any

import zmq

from common.config.node import NodeConfig
from common.errors import ConfigError
from common.wire.address import cannot_bind, in_url, zmq_endpoint
from common.wire.curve import CurveKeys, fingerprint
from common.wire.mailbox import SILENCE_S, Mailbox
from common.wire.messages import ToListeningNode
from common.wire.process_id import new_incarnation

#: A mailbox to each of 1,024 prefill nodes, and some; each has three sockets. ZMQ's own limit is 1,023.
MAX_SOCKETS = 4_096


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """The control plane's end in this process.

    Attributes:
        context: of all sockets.
        incarnation: drawn at each start of a process, and again for each other role that it takes.
        listen: mailbox on which decode nodes reach this node, to receive pages, and gateways that list this node.
        keys: of this process; None: connections are neither encrypted nor authenticated.
        node_timeout_s: silence after which a connection is closed.
    """

    context: "zmq.Context[zmq.Socket[bytes]]"
    incarnation: str
    listen: Mailbox
    keys: CurveKeys | None = None
    node_timeout_s: float = SILENCE_S

    def close(self) -> None:
        """Close the listening socket, then the context with any socket that is still open, for which it would wait."""
        self.listen.close()
        self.context.destroy()

    def is_gateway(self, incarnation: str) -> bool:
        """Whether a process that has connected has the gateway's key; without keys, whether it may have it."""
        return self.keys is None or incarnation.startswith(fingerprint(self.keys.gateway))

    def dial(self, accepts: Any, address: str, server_key: bytes) -> Mailbox:
        """A mailbox connected to ``address``, which accepts only the owner of ``server_key`` as its server."""
        curve = None if self.keys is None else self.keys.client(server_key)
        return Mailbox(
            self.context,
            self.incarnation,
            accepts,
            connect=zmq_endpoint(address),
            curve=curve,
            silence_s=self.node_timeout_s,
        )


def open_endpoint(config: NodeConfig, keys: CurveKeys | None) -> ControlEndpoint:
    """A control endpoint with an incarnation of its own.

    Raises:
        ConfigError: the address at which decode nodes reach this node cannot be bound.
    """
    incarnation = new_incarnation("" if keys is None else keys.fingerprint)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    try:
        host, port, silence_s = config.advertise_host, config.data_port, config.node_timeout
        mailbox = listen_mailbox(
            context, incarnation, host, port, keys=keys, silence_s=silence_s, admits_gateway=config.is_listed
        )
    except ConfigError:
        context.term()
        raise
    return ControlEndpoint(context, incarnation, mailbox, keys, config.node_timeout)


def listen_mailbox(
    context: "zmq.Context[zmq.Socket[bytes]]",
    incarnation: str,
    host: str,
    port: int,
    *,
    keys: CurveKeys | None,
    silence_s: float = SILENCE_S,
    admits_gateway: bool = False,
) -> Mailbox:
    """The socket on which decode nodes reach this node, to receive pages; port 0 takes any free one.

    Args:
        admits_gateway: the owner of the gateway's key may connect, too.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        curve = None
        if keys is not None:
            curve = keys.server_for_gateway if admits_gateway else keys.server
        bind = zmq_endpoint(f"{in_url(host)}:{port}")
        return Mailbox(context, incarnation, ToListeningNode, bind=bind, curve=curve, silence_s=silence_s)
    except zmq.ZMQError as error:
        raise cannot_bind("--advertise-host", host, "--data-port", port, error) from error
