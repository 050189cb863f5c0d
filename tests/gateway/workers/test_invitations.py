"""A gateway asks the nodes that it lists to register, and finds out which keys they have."""

import asyncio
import errno
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import zmq

from common.config.gateway import GatewayConfig
from common.config.shared import Role
from common.errors import ConfigError
from common.node.endpoint import listen_mailbox
from common.wire.curve import CurveKeys, new_secret, public_key
from common.wire.mailbox import Mailbox
from common.wire.messages import Invite
from common.wire.process_id import new_incarnation
from gateway.workers import invitations
from gateway.workers.invitations import Invitations

GATEWAY = "10.0.0.1:8001"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invitations, "TICK_S", 0.01)
    monkeypatch.setattr(invitations, "SEARCH_S", 0.01)


@pytest.fixture
def node_context() -> Iterator[Any]:
    """A process has one authenticator, so a node needs a context of its own."""
    made: Any = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def keys() -> tuple[CurveKeys, list[CurveKeys]]:
    """Of a gateway, and of three hosts of nodes."""
    secret, nodes = new_secret(), [new_secret() for _ in range(3)]
    permitted = {public_key(node): f"host-{i}" for i, node in enumerate(nodes)}
    gateway = public_key(secret)
    return CurveKeys(secret, gateway, permitted), [CurveKeys(node, gateway, permitted) for node in nodes]


def listening(context: Any, keys: CurveKeys | None = None, *, admits_gateway: bool = True) -> Mailbox:
    incarnation = new_incarnation("" if keys is None else keys.fingerprint)
    return listen_mailbox(context, incarnation, "127.0.0.1", 0, keys=keys, admits_gateway=admits_gateway)


def inviting(context: Any, nodes: Mapping[str, Role], keys: CurveKeys | None = None) -> Invitations:
    incarnation = new_incarnation("" if keys is None else keys.fingerprint)
    return Invitations(context, incarnation, nodes, keys=keys, address=GATEWAY)


async def heard(node: Mailbox, count: int) -> list[Any]:
    """The messages that a node gets."""
    found: list[Any] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            node.connection_events()
            found += [envelope.message for envelope in node.receive()]
            await asyncio.sleep(0.002)
    return found


async def test_listed_nodes_are_asked_again_and_again_to_register(context: Any) -> None:
    prefill, decode = listening(context), listening(context)
    asking = inviting(context, {f"127.0.0.1:{prefill.port}": "prefill", f"127.0.0.1:{decode.port}": "decode"})
    asking.start()
    assert (await heard(prefill, 3))[:3] == [Invite("prefill", GATEWAY)] * 3
    assert (await heard(decode, 1))[0] == Invite("decode", GATEWAY)
    asking.close()
    prefill.close()
    decode.close()


@pytest.mark.parametrize("host", [0, 1, 2])
async def test_the_gateway_finds_out_which_of_the_permitted_keys_a_node_has(
    context: Any, node_context: Any, keys: tuple[CurveKeys, list[CurveKeys]], host: int
) -> None:
    node = listening(node_context, keys[1][host])
    asking = inviting(context, {f"127.0.0.1:{node.port}": "decode"}, keys[0])
    asking.start()
    assert (await heard(node, 2))[:2] == [Invite("decode", GATEWAY)] * 2
    asking.close()
    node.close()


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_node_that_cannot_be_asked_is_logged_with_the_remedy(
    context: Any,
    node_context: Any,
    keys: tuple[CurveKeys, list[CurveKeys]],
    caplog: pytest.LogCaptureFixture,
    is_known: bool,
) -> None:
    """It was started without ``--gateway listed``, or has a key that the gateway's folder does not permit."""
    stranger = CurveKeys(new_secret(), keys[0].gateway, {})
    node = listening(node_context, keys[1][0] if is_known else stranger, admits_gateway=not is_known)
    asking = inviting(context, {f"127.0.0.1:{node.port}": "decode"}, keys[0])
    asking.start()
    async with asyncio.timeout(60):
        while "cannot ask the node" not in caplog.text:
            node.connection_events()
            await asyncio.sleep(0.002)
    assert ("start it with --gateway listed" if is_known else "it has no key that") in caplog.text
    assert node.receive() == []
    asking.close()
    node.close()


async def test_a_gateway_without_keys_says_that_the_node_may_have_some(
    context: Any, node_context: Any, keys: tuple[CurveKeys, list[CurveKeys]], caplog: pytest.LogCaptureFixture
) -> None:
    node = listening(node_context, keys[1][0])
    asking = inviting(context, {f"127.0.0.1:{node.port}": "decode"})
    asking.start()
    async with asyncio.timeout(60):
        while "it has keys and this gateway has none" not in caplog.text:
            node.connection_events()
            await asyncio.sleep(0.002)
    asking.close()
    node.close()


async def test_keys_are_tried_one_after_the_other_between_two_turns_for_all_nodes(
    context: Any, node_context: Any, keys: tuple[CurveKeys, list[CurveKeys]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invitations, "TICK_S", 1e6 * invitations.SEARCH_S)
    node = listening(node_context, keys[1][2])
    asking = inviting(context, {f"127.0.0.1:{node.port}": "decode"}, keys[0])
    asking.start()
    (listed,) = asking._nodes
    async with asyncio.timeout(60):
        while listed._tried == 0:  # as after the turn for all nodes that finds the first key refused
            node.connection_events()
            listed.tick()
            await asyncio.sleep(0.002)
    assert (await heard(node, 1))[0] == Invite("decode", GATEWAY)
    asking.close()
    node.close()


async def test_the_key_that_a_node_has_is_tried_first_when_it_comes_back(
    context: Any, node_context: Any, keys: tuple[CurveKeys, list[CurveKeys]]
) -> None:
    node = listening(node_context, keys[1][2])
    asking = inviting(context, {f"127.0.0.1:{node.port}": "decode"}, keys[0])
    asking.start()
    await heard(node, 1)
    (listed,) = asking._nodes
    assert listed._candidates == [public_key(keys[1][host].secret) for host in (2, 0, 1)]
    assert listed._tried == 0
    asking.close()
    node.close()


async def test_a_node_that_cannot_be_reached_is_logged_once(
    context: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(invitations, "UNREACHED_S", 0.05)
    with socket.socket() as held:  # bound, so that no other process takes the port, and not listening
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        asking = inviting(context, {address: "decode"})
        asking.start()
        async with asyncio.timeout(60):
            while not caplog.records:
                await asyncio.sleep(0.002)
        assert f"cannot ask the node of --decode at {address} to register: there has been no connection" in caplog.text
        await asyncio.sleep(0.1)
        assert len(caplog.records) == 1
        asking.close()


def test_a_context_has_room_for_all_listed_nodes_or_the_start_ends_with_the_reason(node_context: Any) -> None:
    nodes: dict[str, Role] = dict.fromkeys([f"127.0.0.1:{port}" for port in range(1, 41)], "decode")
    node_context.set(zmq.MAX_SOCKETS, 20)
    with pytest.raises(ConfigError, match=r"--decode 127.0.0.1:\d+: cannot dial it, with 40 nodes listed: .*ulimit -n"):
        inviting(node_context, nodes)
    roomy: Any = zmq.Context()
    roomy.set(zmq.MAX_SOCKETS, 20)
    invitations.raise_socket_limit(roomy, len(nodes))
    inviting(roomy, nodes).close()
    roomy.destroy(linger=0)


async def test_a_node_that_cannot_be_dialled_again_is_tried_later_and_holds_up_no_other(
    context: Any,
    node_context: Any,
    keys: tuple[CurveKeys, list[CurveKeys]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = [listening(node_context, keys[1][2]), listening(context)]
    asking = inviting(context, {f"127.0.0.1:{node.port}": "decode" for node in nodes[:1]}, keys[0])
    asking._nodes += inviting(context, {f"127.0.0.1:{nodes[1].port}": "decode"})._nodes
    dial = invitations._ListedNode._dial
    num_left = 3

    def failing(self: Any, tried: int) -> Mailbox:
        nonlocal num_left
        num_left -= 1
        if num_left >= 0:
            raise zmq.ZMQError(errno.EMFILE)
        return dial(self, tried)

    monkeypatch.setattr(invitations._ListedNode, "_dial", failing)
    asking.start()
    for node in nodes:
        assert (await heard(node, 1))[0] == Invite("decode", GATEWAY)
    assert num_left < 0
    assert "Too many open files" in caplog.text
    asking.close()
    for node in nodes:
        node.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": ("10.0.0.2:8002",)}, "--prefill 10.0.0.2:8002 is on another machine"),
        ({"decode": ("nowhere",)}, "--decode must be HOST:PORT"),
        ({"prefill": ("127.0.0.1:1",), "decode": ("127.0.0.1:1",)}, "twice"),
        ({"prefill": ("127.0.0.1:1",), "control_host": "0.0.0.0", "insecure": True}, "--advertise-control-host"),
        ({"prefill": ("127.0.0.1:1", "10.0.0.2:1"), "insecure": True}, "10.0.0.2:1 cannot reach .* --control-host"),
    ],
)
def test_lists_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GatewayConfig(**options)
