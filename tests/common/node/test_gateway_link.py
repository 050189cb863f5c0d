"""The load that a node passes on between its gateways, and what a gateway has acknowledged."""

from support.cluster.manual_clock import ManualClock
from support.gateway.fake_nodes import make_register

from common.node.gateways.gateway_link import GatewayLink, total_load
from common.wire.messages import ClientLoad, Heartbeat, HeartbeatAck, Message, OtherLoad, Registered


def test_the_load_of_several_gateways_is_added():
    loads = [ClientLoad(1.0, 100.0, 10_000.0, 10.0), ClientLoad(0.5, 0.0, 0.0, 5.0), ClientLoad()]
    assert total_load(loads) == ClientLoad(1.5, 100.0, 10_000.0, 15.0)


def test_a_node_with_one_gateway_tells_it_of_no_other_load():
    assert total_load([]) == ClientLoad()


class Sent:
    """A mailbox that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, *messages: Message, target: str) -> None:
        self.messages += messages


def test_a_heartbeat_that_was_sent_before_a_new_registration_was_answered_is_acknowledged_once():
    """The gateway has counted the node as lost, and answers the registration and then the heartbeat."""
    register = make_register("decode", "decode-0")
    link = GatewayLink(Sent(), "127.0.0.1:1", lambda: register, ManualClock(), is_alone=True)  # type: ignore[arg-type]

    def beat() -> None:
        link.beat(Heartbeat(0, 0, 0, 0, 0, {}), (), None, ClientLoad())

    link.register()
    link.on_registered(Registered(1, 1.0))
    beat()
    link.register()
    beat()
    link.on_registered(Registered(1, 1.0))
    link.on_acknowledged(HeartbeatAck(0.0))
    link.expect_ack()
    assert not link.has_acknowledged
    beat()
    assert not link.has_acknowledged
    link.on_acknowledged(HeartbeatAck(0.0))
    assert link.has_acknowledged


def test_a_gateway_hears_that_the_load_of_others_is_gone_which_it_heard_of_before_its_answer():
    """It forgets that load when it gets the registration, and not when the node gets its answer."""
    sent, register = Sent(), make_register("decode", "decode-0")
    link = GatewayLink(sent, "127.0.0.1:1", lambda: register, ManualClock(), is_alone=False)  # type: ignore[arg-type]
    link.register()
    link.on_registered(Registered(1, 1.0))
    link.register()
    link.tell_other_load(OtherLoad(9_000, 90))
    link.on_registered(Registered(1, 1.0))
    link.tell_other_load(OtherLoad(0, 0))
    assert sent.messages[-2:] == [OtherLoad(9_000, 90), OtherLoad(0, 0)]
