"""Bare ZMQ sockets that a gateway or a prefill node of the test run permits, for frames that no mailbox sends."""

from typing import Any

import zmq

from common.wire.curve import CurveKeys
from common.wire.key_folder import load_keys
from common.wire.mailbox import set_keys
from common.wire.process_id import new_incarnation


def node_keys() -> CurveKeys:
    """The keys of all nodes that the tests start without ``--keys``."""
    keys = load_keys(None, is_insecure=False, role="node")
    assert keys is not None
    return keys


def raw_peer(context: Any, address: str, *, server: bytes = b"") -> tuple[Any, str]:
    """A connected socket and its incarnation.

    Args:
        server: public key of a prefill node; empty: the gateway's.
    """
    keys = node_keys()
    socket = context.socket(zmq.DEALER)
    incarnation = new_incarnation(keys.fingerprint)
    socket.set(zmq.ROUTING_ID, incarnation.encode())
    set_keys(socket, keys.client(server or keys.gateway))
    socket.connect(f"tcp://{address}")
    return socket, incarnation
