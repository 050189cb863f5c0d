"""The version of the protocol: it rises with every change, and a peer with another one is refused."""

import hashlib
import struct
import types
from typing import Any

import msgspec
import zmq
from msgspec import inspect

from common.wire import messages
from common.wire.mailbox import Mailbox
from common.wire.messages import PROTOCOL_VERSION, Deregister, FromGateway, FromNode, Header, Refused
from common.wire.process_id import new_incarnation
from kv_transfer.transports.nixl import peer_state as nixl_peer_state
from kv_transfer.transports.shm import protocol as shm_protocol
from kv_transfer.transports.tcp import protocol as tcp_protocol
from kv_transfer.transports.torch_distributed import rendezvous

#: The protocol version, and the digest of its messages.
PINNED = (22, "0eff54a44cd43ebe")

ON_THE_CONTROL_PLANE = (
    messages.Header,
    messages.FromNode,
    messages.FromGateway,
    messages.ToListeningNode,
    messages.FromPrefill,
)
ON_DATA_CONNECTIONS = (tcp_protocol, shm_protocol, rendezvous)


def shape_of(told: Any) -> Any:
    """The description that a decoder uses, as plain values: types, names, defaults, limits."""
    if isinstance(told, inspect.EnumType):
        return ["one of", [member.value for member in told.cls]]
    if isinstance(told, type):
        return told.__name__
    if isinstance(told, inspect.Type | inspect.Field):
        return [type(told).__name__, *(shape_of(getattr(told, name)) for name in told.__struct_fields__)]
    if isinstance(told, tuple | list | frozenset):
        return [shape_of(part) for part in told]
    return repr(told)


def frames_of(module: types.ModuleType) -> list[str]:
    """The struct formats and magic bytes of a data connection."""
    found = [
        f"{name} {value.format if isinstance(value, struct.Struct) else value!r}"
        for name, value in vars(module).items()
        if isinstance(value, struct.Struct) or (isinstance(value, bytes) and not name.startswith("_"))
    ]
    return sorted(found)


def digest() -> str:
    shapes = [shape_of(inspect.type_info(some)) for some in (*ON_THE_CONTROL_PLANE, nixl_peer_state.Endpoint)]
    shapes += [frames_of(module) for module in ON_DATA_CONNECTIONS]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def test_the_version_rises_with_every_change_of_the_protocol() -> None:
    assert (PROTOCOL_VERSION, digest()) == PINNED, (
        f"the protocol is not that of version {PINNED[0]}: raise PROTOCOL_VERSION in "
        f"common/wire/messages.py to {PINNED[0] + 1}, and write {(PINNED[0] + 1, digest())} into PINNED here"
    )


def test_a_field_a_limit_a_default_and_a_name_each_change_the_digest() -> None:
    def shape(**fields: Any) -> Any:
        made = msgspec.defstruct("Said", [(name, *said) for name, said in fields.items()], tag="said")
        return shape_of(inspect.type_info(made))

    count = messages.Count
    shapes = [
        shape(a=(int,)), shape(b=(int,)), shape(a=(int, 0)), shape(a=(int, 1)), shape(a=(count,)), shape(a=(str,)),
        shape(a=(int,), b=(int,)), shape(a=(messages.ErrorCode,)),
    ]  # fmt: skip
    assert len({repr(shape) for shape in shapes}) == len(shapes)


def test_every_version_understands_a_refusal() -> None:
    """As version 1 decoded it; never to be changed."""
    header = msgspec.msgpack.encode(Header(1, "a" * 32, ""))
    assert msgspec.msgpack.decode(header) == [1, "a" * 32, ""]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Refused("no"))) == {
        "type": "refused",
        "reason": "no",
        "epoch": 0,
    }


def test_a_node_with_another_version_is_refused_in_its_own_version(context: "zmq.Context[Any]") -> None:
    gateway = Mailbox(context, new_incarnation(), FromNode, bind="tcp://127.0.0.1:*")
    me, other = new_incarnation(), PROTOCOL_VERSION + 1
    node = context.socket(zmq.DEALER)
    node.set(zmq.ROUTING_ID, me.encode())
    node.connect(gateway.address)
    node.send_multipart([msgspec.msgpack.encode(Header(other, me, "")), msgspec.msgpack.encode(Deregister())])
    assert gateway.sockets[0].poll(60_000)
    assert gateway.receive() == []
    assert gateway.dropped == {"version": 1}
    assert node.poll(60_000), "no answer"
    head, body = node.recv_multipart()
    assert msgspec.msgpack.decode(head, type=Header) == Header(other, gateway.incarnation, me)
    refusal = msgspec.msgpack.decode(body, type=FromGateway)
    assert refusal == Refused(
        f"it speaks version {other} of the protocol, and this process version {PROTOCOL_VERSION}: "
        "run the same release of Baton everywhere"
    )
    gateway.close()
    node.close(0)
