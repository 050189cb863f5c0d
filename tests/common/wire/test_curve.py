"""Mailboxes with keys: only permitted processes connect, and nothing on the way changes what arrives."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.kv.frame_damage import Change, changes, mangled
from support.wire.hostile_proxy import Attack, HostileProxy

from common.errors import ConfigError
from common.wire import mailbox
from common.wire.curve import CurveKeys, draw_keys, fingerprint, new_secret, public_key
from common.wire.mailbox import HandshakeFailure, Mailbox
from common.wire.messages import PROTOCOL_VERSION, Abort, Deregister, FromGateway, FromNode, Header, Heartbeat
from common.wire.process_id import new_incarnation

GATEWAY, NODE = draw_keys()
OTHER_SECRET = new_secret()
BOTH = replace(GATEWAY, permitted={**GATEWAY.permitted, public_key(OTHER_SECRET): "other"})
OTHER = replace(NODE, secret=OTHER_SECRET)

SILENCE_S = 2.0  # without an answer; then a node dials again

Context = zmq.Context[Any]
T = TypeVar("T")


@pytest.fixture
def other_context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def gateway(context: Context) -> Iterator[Mailbox]:
    made = bind(context)
    yield made
    made.close()


def bind(context: Context, keys: CurveKeys = BOTH, address: str = "tcp://127.0.0.1:*") -> Mailbox:
    return Mailbox(context, new_incarnation(keys.fingerprint), FromNode, bind=address, curve=keys.server)


def dial(context: Context, address: str, keys: CurveKeys = NODE, incarnation: str = "") -> Mailbox:
    me = incarnation or new_incarnation(keys.fingerprint)
    return Mailbox(context, me, FromGateway, connect=address, curve=keys.client(keys.gateway))


def until(what: Callable[[], T], *others: Mailbox) -> T:
    """Call ``what`` until it returns something true; the other mailboxes do their part meanwhile."""
    ends = time.monotonic() + 120
    while not (found := what()):
        for other in others:
            other.connection_events()
        assert time.monotonic() < ends, "the expected state was not reached"
        time.sleep(0.002)
    return found


def received(box: Mailbox, *others: Mailbox) -> list[Any]:
    return [envelope.message for envelope in until(box.receive, box, *others)]


# ---- permitted and refused ------------------------------------------------------------------------------------------


def test_messages_go_both_ways_between_a_gateway_and_permitted_nodes(context: Context, gateway: Mailbox) -> None:
    for keys in (NODE, OTHER):
        node = dial(context, gateway.address, keys)
        node.send(Deregister())
        (envelope,) = until(gateway.receive, gateway, node)
        assert (envelope.sender, envelope.message) == (node.incarnation, Deregister())
        assert node.incarnation.startswith(fingerprint(keys.public))
        assert gateway.send(Abort("r", 0), target=node.incarnation)
        assert received(node) == [Abort("r", 0)]
        node.close()
        assert until(lambda node=node: gateway.lost_peers([node.incarnation])) == [node.incarnation]
    assert gateway.refused == gateway.dropped == {}


def test_a_node_cannot_take_the_place_of_a_connection_of_another_key(context: Context, gateway: Mailbox) -> None:
    victim = dial(context, gateway.address)
    victim.send(Deregister())
    assert received(gateway, victim) == [Deregister()]
    thief = context.socket(zmq.DEALER)
    thief.set(zmq.ROUTING_ID, f"{victim.incarnation}.999".encode())
    mailbox.set_keys(thief, OTHER.client(OTHER.gateway))
    thief.connect(gateway.address)
    header = Header(PROTOCOL_VERSION, victim.incarnation, "")
    thief.send_multipart([msgspec.msgpack.encode(header), msgspec.msgpack.encode(Deregister())])
    until(lambda: gateway.receive() or gateway.dropped, gateway, victim)
    assert gateway.dropped == {"sender": 1}
    assert gateway.send(Abort("r", 0), target=victim.incarnation)
    assert received(victim, gateway) == [Abort("r", 0)]
    thief.close(0)
    victim.send(Heartbeat(1, 0, 0, 0, 0, {}))
    assert received(gateway, victim) == [Heartbeat(1, 0, 0, 0, 0, {})]
    victim.close()


STRANGERS = {
    "a key that is not permitted": (replace(NODE, secret=new_secret()), HandshakeFailure.KEY, HandshakeFailure.KEY),
    "another gateway's key": (
        replace(NODE, gateway=public_key(new_secret())),
        HandshakeFailure.CLOSED,
        HandshakeFailure.HANDSHAKE,
    ),
    "no key": (None, HandshakeFailure.PROTOCOL, HandshakeFailure.HANDSHAKE),
}


@pytest.mark.parametrize(("keys", "told", "counted"), STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_refused_and_learns_why_and_the_gateway_counts_it(
    context: Context, gateway: Mailbox, keys: CurveKeys | None, told: HandshakeFailure, counted: HandshakeFailure
) -> None:
    if keys is None:
        stranger = Mailbox(context, new_incarnation(), FromGateway, connect=gateway.address)
    else:
        stranger = dial(context, gateway.address, keys)
    stranger.send(Deregister())
    assert until(lambda: stranger.connection_events().failure, gateway) is told
    until(lambda: gateway.refused[counted], gateway)
    assert gateway.receive() == stranger.receive() == []
    assert set(gateway.refused) == {counted}
    node = dial(context, gateway.address)
    node.send(Deregister())
    assert received(gateway) == [Deregister()]
    node.close()
    stranger.close()


def test_nothing_is_delivered_before_the_key_is_permitted(context: Context, gateway: Mailbox) -> None:
    node = dial(context, gateway.address)
    node.send(Deregister())
    assert not gateway.sockets[0].poll(300), "the authenticator has not answered yet"
    assert received(gateway) == [Deregister()]
    node.close()


def test_a_node_cannot_pass_for_the_gateway(context: Context) -> None:
    impostor = bind(context, replace(NODE, permitted=BOTH.permitted))
    node = dial(context, impostor.address, OTHER)
    node.send(Deregister())
    assert until(lambda: node.connection_events().failure, impostor) is HandshakeFailure.CLOSED
    assert impostor.receive() == []
    assert not impostor.send(Abort("r", 0), target=node.incarnation)
    node.close()
    impostor.close()


def test_a_permitted_node_cannot_speak_for_a_node_with_another_key(context: Context, gateway: Mailbox) -> None:
    impostor = dial(context, gateway.address, OTHER, incarnation=new_incarnation(NODE.fingerprint))
    impostor.send(Deregister())
    until(lambda: gateway.receive() or gateway.dropped, gateway)
    assert gateway.dropped == {"sender": 1}
    impostor.close()


def test_a_refused_node_connects_once_the_gateway_permits_its_key(
    context: Context, other_context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "REDIAL_S", 0.1)
    gateway = bind(context, GATEWAY)
    address = gateway.address
    node = dial(context, address, OTHER)
    assert until(lambda: node.connection_events().failure, gateway) is HandshakeFailure.KEY
    gateway.close()
    gateway = until(lambda: _rebound(other_context, address))
    assert until(lambda: node.connection_events().connected, gateway)
    silent_at = time.monotonic()

    def turn() -> bool:
        nonlocal silent_at
        if time.monotonic() - silent_at > SILENCE_S:  # as the loop of a node does
            silent_at = time.monotonic()
            node.redial()
        node.connection_events()
        node.send(Deregister())
        return bool(gateway.receive())

    until(turn, gateway)
    node.close()
    gateway.close()


def test_a_mailbox_that_cannot_bind_leaves_no_socket_in_its_context(gateway: Mailbox) -> None:
    context: Context = zmq.Context()
    mailbox_of_context = bind(context)
    for address in (gateway.address, "tcp://127.0.0.1:*"):  # the address is in use, then the context's authenticator is
        with pytest.raises(zmq.ZMQError):
            bind(context, address=address)
    mailbox_of_context.close()
    context.term()  # waits until all sockets are closed


def _rebound(context: Context, address: str) -> Mailbox | None:
    try:
        return bind(context, BOTH, address)
    except zmq.ZMQError:
        return None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"secret": "0", "gateway": "0", "permitted": {}}', "keys"])
def test_keys_from_a_damaged_variable_are_refused_without_repeating_it(text: str) -> None:
    assert CurveKeys.from_json(NODE.to_json()) == NODE
    assert NODE.secret.hex() not in repr(NODE)
    with pytest.raises(ConfigError, match=r"^BATON_KEYS must be the name of a folder made by baton keygen$"):
        CurveKeys.from_json(text)


# ---- on the way -----------------------------------------------------------------------------------------------------


NUM_SENT = 4
NUM_HANDSHAKE_FRAMES = 5  # of each end: three parts of the greeting, two commands


@pytest.fixture
def proxy(gateway: Mailbox) -> Iterator[HostileProxy]:
    made = HostileProxy(gateway.port)
    yield made
    made.close()


@pytest.mark.parametrize("to_server", [True, False], ids=["node to gateway", "gateway to node"])
def test_changed_frames_are_never_received_and_the_connection_is_made_again(
    context: Context, gateway: Mailbox, proxy: HostileProxy, monkeypatch: pytest.MonkeyPatch, to_server: bool
) -> None:
    """What arrives was sent, arrives once, and in order. Frames of the handshake are changed, too.

    CURVE does not notice frames that are taken out; the messages that need it have numbers of their own.
    """
    monkeypatch.setattr(mailbox, "REDIAL_S", 0.2)
    monkeypatch.setattr(mailbox, "HANDSHAKE_MS", 1_000)

    @settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
    @given(changes=changes, first=st.integers(0, NUM_HANDSHAKE_FRAMES), count=st.integers(1, 2 * NUM_SENT))
    def run(changes: list[Change], first: int, count: int) -> None:
        count = 1 if first < NUM_HANDSHAKE_FRAMES else count  # the other end waits for each frame of the handshake
        proxy.attack = Attack(to_server, first, count, lambda frames: mangled(frames, changes))
        node = dial(context, f"tcp://127.0.0.1:{proxy.port}")
        sent = [Heartbeat(number, 0, 0, 0, 0, {}) for number in range(NUM_SENT)]
        answers = [Abort("r", number) for number in range(NUM_SENT)]
        heard: list[Any] = []
        told: list[Any] = []
        lasts = (Heartbeat(99, 0, 0, 0, 0, {}), Abort("r", 99))

        silent_at = time.monotonic()

        def turn() -> bool:
            nonlocal silent_at
            events = node.connection_events()
            if time.monotonic() - silent_at > SILENCE_S:  # as the loop of a node does
                silent_at = time.monotonic()
                node.redial()
            gateway.connection_events()
            if events.connected and proxy.attack is not None:
                for message in sent:
                    node.send(message)
            elif proxy.attack is None:
                node.send(lasts[0])
            for envelope in gateway.receive():
                if envelope.sender != node.incarnation:
                    continue  # from the node of the last example
                heard.append(envelope.message)
                if envelope.message in sent:
                    gateway.send(answers[sent.index(envelope.message)], target=node.incarnation)
                else:
                    gateway.send(lasts[1], target=node.incarnation)
            told.extend(envelope.message for envelope in node.receive())
            return lasts[1] in told

        until(turn)
        for arrived, whole, last in ((heard, sent, lasts[0]), (told, answers, lasts[1])):
            numbers = [whole.index(message) for message in arrived if message != last]
            assert numbers == sorted(set(numbers))
        node.close()

    run()


def test_a_recorded_connection_can_be_replayed_without_effect(
    context: Context, gateway: Mailbox, proxy: HostileProxy
) -> None:
    node = dial(context, f"tcp://127.0.0.1:{proxy.port}")
    node.send(Deregister())
    assert received(gateway) == [Deregister()]
    node.close()
    record = bytes(proxy.recorded[0])
    assert len(record) > 500
    for _ in range(3):
        with (
            socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as replayed,
            contextlib.suppress(ConnectionResetError),
        ):
            replayed.sendall(record)
            while True:
                gateway.connection_events()
                replayed.settimeout(0.01)
                try:
                    if not replayed.recv(4096):
                        break
                except TimeoutError:
                    continue
    assert gateway.receive() == []
    until(lambda: gateway.refused[HandshakeFailure.HANDSHAKE] == 3, gateway)


# ---- floods ---------------------------------------------------------------------------------------------------------


def test_connections_that_do_not_finish_the_handshake_are_closed(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "HANDSHAKE_MS", 1_000)
    gateway = bind(context)
    node = dial(context, gateway.address)
    crowd = [socket.create_connection(("127.0.0.1", gateway.port), timeout=60) for _ in range(100)]
    for number, silent in enumerate(crowd):
        if number % 2:
            with contextlib.suppress(ConnectionError):  # it is closed already
                silent.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE")  # the beginning of a greeting
    node.send(Deregister())
    assert received(gateway) == [Deregister()]
    for silent in crowd:
        with silent, contextlib.suppress(ConnectionResetError):
            while silent.recv(4096):
                gateway.connection_events()
    until(lambda: gateway.refused.total() >= len(crowd), gateway)
    node.send(Deregister())
    assert received(gateway) == [Deregister()]
    node.close()
    gateway.close()
