"""A node that waits for gateways to name it."""

import pytest
from support.cluster.manual_clock import ManualClock

from common.config.node import NodeConfig
from common.discovery.announcement import TTL_S
from common.discovery.gateway_directory import MAX_GATEWAYS, FixedGateways, ListedGateways
from common.errors import ConfigError
from common.wire.messages import Invite

FIRST, SECOND = "127.0.0.1:8001", "127.0.0.1:8011"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def directory(clock: ManualClock) -> ListedGateways:
    return ListedGateways("decode", NodeConfig().check_gateway, clock)


def test_gateways_are_known_for_a_while_after_they_have_named_the_node(
    directory: ListedGateways, clock: ManualClock
) -> None:
    assert directory.addresses() == ()
    directory.invited(Invite("decode", FIRST))
    clock.advance(TTL_S - 1)
    directory.invited(Invite("decode", SECOND))
    assert directory.addresses() == (FIRST, SECOND)
    clock.advance(2)
    assert directory.addresses() == (SECOND,)
    directory.invited(Invite("decode", FIRST))
    assert set(directory.addresses()) == {FIRST, SECOND}


@pytest.mark.parametrize(
    ("invite", "reason"),
    [
        (Invite("prefill", FIRST), "it names this decode node with --prefill"),
        (Invite("decode", "10.1.2.3:8001"), "is on another machine"),
        (Invite("decode", "nonsense"), "must be HOST:PORT"),
        (Invite("prefill", "x:1\nERROR forged"), r"'x:1\nERROR forged'"),
        (Invite("decode", "x:1\nERROR forged"), r"the gateway at 'x:1\nERROR forged'"),
    ],
)
def test_gateways_to_which_the_node_must_not_connect_are_ignored(
    directory: ListedGateways, caplog: pytest.LogCaptureFixture, invite: Invite, reason: str
) -> None:
    for _ in range(3):
        directory.invited(invite)
    assert directory.addresses() == ()
    assert caplog.text.count(reason) == 1


def test_the_number_of_gateways_is_bounded(directory: ListedGateways) -> None:
    for port in range(1, MAX_GATEWAYS + 10):
        directory.invited(Invite("decode", f"127.0.0.1:{port}"))
    assert len(directory.addresses()) == MAX_GATEWAYS


def test_a_node_that_names_its_gateways_says_how_it_could_be_listed(caplog: pytest.LogCaptureFixture) -> None:
    directory = FixedGateways((FIRST,))
    for _ in range(3):
        directory.invited(Invite("decode", f"{SECOND}\nERROR forged"))
    assert len(caplog.text.splitlines()) == 1
    assert directory.addresses() == (FIRST,)
    assert caplog.text.count("start the node with --gateway listed") == 1


def test_a_listed_node_needs_a_port_that_gateways_can_name() -> None:
    assert NodeConfig(gateway="listed", data_port=8002).gateways == ()
    with pytest.raises(ConfigError, match="--data-port"):
        NodeConfig(gateway="listed")
