"""The control plane's end in a node: its incarnation, its keys, the socket that it listens on, and dialling others."""

from dataclasses import dataclass
from typing import Any

import zmq

from common.config.node import NodeConfig
from common.errors import ConfigError
from common.wire.address import in_url
from common.wire.curve import CurveKeys
from common.wire.mailbox import SILENCE_S, Mailbox
from common.wire.messages import FromDecode
from common.wire.process_id import new_incarnation


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """The control plane's end in this process.

    Attributes:
        context: of all sockets.
        incarnation: drawn at each start of a process, and again for each other role that it takes.
        listen: mailbox on which decode nodes reach this node, to receive pages.
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

    def dial(self, accepts: Any, address: str, server_key: bytes) -> Mailbox:
        """A mailbox connected to ``address``, which accepts only the owner of ``server_key`` as its server."""
        curve = None if self.keys is None else self.keys.client(server_key)
        return Mailbox(
            self.context,
            self.incarnation,
            accepts,
            connect=f"tcp://{address}",
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
    try:
        host, port, silence_s = config.advertise_host, config.data_port, config.node_timeout
        mailbox = listen_mailbox(context, incarnation, host, port, keys=keys, silence_s=silence_s)
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
) -> Mailbox:
    """The socket on which decode nodes reach this node, to receive pages; port 0 takes any free one.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        curve = None if keys is None else keys.server
        bind = f"tcp://{in_url(host)}:{port}"
        return Mailbox(context, incarnation, FromDecode, bind=bind, curve=curve, silence_s=silence_s)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot bind --advertise-host {host} --data-port {port}: {error.strerror or error}"
        ) from error
