"""CURVE on the control sockets: the keys of a process, and the decision which clients may connect.

Every process has a key pair. A client names the public key of the server that it dials, so that no other process can
pass for it; a server accepts only clients whose public keys it permits. The gateway serves nodes, and a prefill node
serves decode nodes. The keys of nodes and of the gateway are different ones, so a node cannot pass for the gateway.

The fingerprint of its key begins the incarnation of a process. Servers compare it with the key of the connection at
every message, so one permitted node cannot speak for another one with another key.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from common.errors import ConfigError

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"baton"
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class CurveServer:
    """Keys of a bound socket.

    Attributes:
        permitted: names of the clients that may connect, by public key.
    """

    secret: bytes = field(repr=False)
    permitted: Mapping[bytes, str]


@dataclass(frozen=True, slots=True)
class CurveClient:
    """Keys of a connecting socket.

    Attributes:
        server: public key of the process that it dials.
    """

    secret: bytes = field(repr=False)
    server: bytes


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The keys of one process. All keys are 32 bytes.

    Attributes:
        gateway: public key of the gateway.
        permitted: names of the nodes that may connect to this process, by public key.
    """

    secret: bytes = field(repr=False)
    gateway: bytes
    permitted: Mapping[bytes, str]

    @property
    def public(self) -> bytes:
        return public_key(self.secret)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public)

    @property
    def server(self) -> CurveServer:
        return CurveServer(self.secret, self.permitted)

    @property
    def server_for_gateway(self) -> CurveServer:
        """As ``server``, for a node to which the gateway may connect, too."""
        return CurveServer(self.secret, {**self.permitted, self.gateway: "gateway"})

    def client(self, server: bytes) -> CurveClient:
        return CurveClient(self.secret, server)

    def to_json(self) -> str:
        """The keys as a text for the environment of a child process. It holds the secret."""
        permitted = {key.hex(): name for key, name in self.permitted.items()}
        return json.dumps({"secret": self.secret.hex(), "gateway": self.gateway.hex(), "permitted": permitted})

    @classmethod
    def from_json(cls, text: str) -> "CurveKeys":
        """Raises ConfigError: ``text`` is not from ``to_json``; the message does not repeat it."""
        try:
            found = json.loads(text)
            permitted = {_key(key): str(name) for key, name in found["permitted"].items()}
            return cls(_key(found["secret"]), _key(found["gateway"]), permitted)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError("BATON_KEYS must be the name of a folder made by baton keygen") from None


def _key(text: str) -> bytes:
    key = bytes.fromhex(text)
    if len(key) != KEY_BYTES:
        raise ValueError("not a key")
    return key


def new_secret() -> bytes:
    return z85.decode(zmq.curve_keypair()[1])


def public_key(secret: bytes) -> bytes:
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def fingerprint(public: bytes) -> str:
    """Sixteen hexadecimal digits that identify a public key, with which incarnations of its processes begin."""
    return hashlib.sha256(public).hexdigest()[:16]


def draw_keys() -> tuple[CurveKeys, CurveKeys]:
    """Return new keys of a gateway, and those of all its nodes."""
    gateway, node = new_secret(), new_secret()
    permitted = {public_key(node): "node"}
    public = public_key(gateway)
    return CurveKeys(gateway, public, permitted), CurveKeys(node, public, permitted)


class ZapHandler:
    """Answers ZMQ's questions whether a client may connect (ZAP, RFC 27). A context can have only one.

    ZMQ asks after the handshake has proved that the client has the secret of its key. A connection without an answer
    waits, and delivers no message.

    Args:
        on_refused: called with a description of each client that is refused.

    Raises:
        zmq.ZMQError: the context has one already.
    """

    def __init__(
        self, context: zmq.Context[Any], permitted: Mapping[bytes, str], on_refused: Callable[[str], None]
    ) -> None:
        self._user_ids = {key: fingerprint(key).encode() for key in permitted}
        self._on_refused = on_refused
        self.socket = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        try:
            self.socket.bind(ZAP_ADDRESS)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def answer_all(self) -> None:
        """Answer all waiting questions; never blocks."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._answer(frames))

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        version, request, _domain, address, _routing_id, mechanism, *credentials = frames
        user_id = self._user_ids.get(credentials[0]) if mechanism == b"CURVE" and credentials else None
        if user_id is not None:
            return [version, request, b"200", b"OK", user_id, b""]
        key = z85.encode(credentials[0]).decode() if credentials and len(credentials[0]) == KEY_BYTES else "none"
        self._on_refused(f"the key {key} of {address.decode(errors='replace')} is not permitted")
        return [version, request, b"400", b"not permitted", b"", b""]
