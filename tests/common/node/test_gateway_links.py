"""The links of a node to the gateways of its directory: which there are, and when one is left."""

import contextlib
import errno
from collections.abc import Iterator

import pytest
import zmq
from support.cluster.manual_clock import ManualClock

from common.clock import Clock, MonotonicClock
from common.discovery.gateway_directory import MAX_GATEWAYS
from common.node.endpoint import ControlEndpoint, listen_mailbox
from common.node.gateways.gateway_links import REFUSED_S, UNDIALLED_S, GatewayLinks
from common.wire.messages import Registered


class Directory:
    """Gateways that come and go."""

    description = "a directory"

    def __init__(self, *known: str, is_fixed: bool = False) -> None:
        self.known = known
        self.is_fixed = is_fixed

    def addresses(self) -> tuple[str, ...]:
        return self.known


@contextlib.contextmanager
def links_to(directory: Directory, clock: Clock | None = None) -> Iterator[GatewayLinks]:
    """Links that nothing is received from."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = ControlEndpoint(context, "n" * 32, listen_mailbox(context, "n" * 32, "127.0.0.1", 0, keys=None))
    clock = clock or MonotonicClock()
    links = GatewayLinks(
        directory, endpoint, register=lambda: None, clock=clock, poller=zmq.Poller(), max_running=1,
    )  # type: ignore[arg-type]  # fmt: skip
    try:
        yield links
    finally:
        for mailbox in [*links.mailboxes(), endpoint.listen]:
            mailbox.close()
        context.term()


def test_a_node_is_refused_once_every_announced_gateway_has_refused_it() -> None:
    directory = Directory("127.0.0.1:1", "127.0.0.1:2")
    with links_to(directory) as links:
        assert links.addresses == "127.0.0.1:1,127.0.0.1:2"
        _, second = links
        links.on_refused(second, "it serves another model")
        assert links.refused is None
        directory.known = ("127.0.0.1:2",)
        links.follow_directory()
        assert (links.addresses, links.refused) == ("", "it serves another model")


def test_a_node_that_knows_no_gateway_says_so_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    directory = Directory()
    directory.description = "the gateways that /etc/gateways names"
    with caplog.at_level("INFO"), links_to(directory, clock) as links:
        missing = "the address of a gateway: none is known of the gateways that /etc/gateways names"
        assert links.waits_for == missing
        for _ in range(70):
            clock.advance(0.1)
            links.remind(clock.now())
        assert [record.message for record in caplog.records] == [f"still waiting for {missing}"] * 2
        directory.known = ("127.0.0.1:1",)
        links.follow_directory()
        assert links.waits_for == "a connection to the gateway at 127.0.0.1:1"
        (link,) = links
        link.is_dialling = False
        assert links.waits_for == "the gateway at 127.0.0.1:1"
        links.on_registered(link, Registered(1, 1.0))
        assert links.waits_for == ""


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_gateway_that_has_refused_a_node_is_asked_again_after_a_while(
    is_fixed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    with links_to(Directory("127.0.0.1:1", "127.0.0.1:2", is_fixed=is_fixed), clock) as links:
        for _ in range(2):
            _, second = links
            links.on_refused(second, "a node of this name is registered already")
            clock.advance(REFUSED_S - 1.0)
            links.follow_directory()
            assert links.addresses == "127.0.0.1:1"
            clock.advance(1.0)
            links.follow_directory()
            assert links.addresses == "127.0.0.1:1,127.0.0.1:2"
        assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1, "it says so once"
        first, second = links
        links.on_registered(second, Registered(1, 1.0))
        links.on_refused(first, "it serves another model")
        assert links.refused is None, "the other one has accepted it"


def test_a_node_is_refused_while_a_gateway_that_has_refused_it_does_not_answer_again() -> None:
    clock = ManualClock()
    with links_to(Directory("127.0.0.1:1", "127.0.0.1:2"), clock) as links:
        first, second = links
        links.on_refused(second, "it serves another model")
        clock.advance(REFUSED_S)
        links.follow_directory()
        links.on_refused(first, "it serves another model, too")
        assert links.refused == "it serves another model, too"


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_gateway_that_cannot_be_dialled_is_tried_again_after_a_while(
    is_fixed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    clock = ManualClock()
    with monkeypatch.context() as without_descriptors, links_to(Directory("127.0.0.1:1"), clock) as links:
        assert links.addresses == "127.0.0.1:1"  # the sockets of this test itself need descriptors
        directory = Directory("127.0.0.1:2", "127.0.0.1:3", is_fixed=is_fixed)
        links._directory = directory
        [first] = links
        without_descriptors.setattr(zmq.Socket, "get_monitor_socket", refuse)
        links._leave(first)
        links._follow()
        assert (links.addresses, links.refused) == ("", None)
        assert "127.0.0.1:2, trying again later: Too many open files" in caplog.text
        without_descriptors.undo()
        clock.advance(UNDIALLED_S / 2)
        links.follow_directory()
        assert (links.addresses, links.refused) == ("", None)
        clock.advance(UNDIALLED_S / 2)
        links.follow_directory()
        assert links.addresses == "127.0.0.1:2,127.0.0.1:3"
        links.follow_directory()
        assert links.addresses == "127.0.0.1:2,127.0.0.1:3"


def test_a_gateway_with_two_addresses_keeps_one_link_and_an_error_names_both(caplog: pytest.LogCaptureFixture) -> None:
    directory = Directory("localhost:1", "127.0.0.1:1", "127.0.0.1:2")
    with links_to(directory) as links:
        first, second, other = links
        for link, gateway in (first, "1" * 32), (second, "1" * 32), (other, "2" * 32):
            links.leave_duplicates(link, gateway)
            link.heard_from(gateway)
            links.on_registered(link, Registered(1, 1.0))
        assert list(links) == [second, other]
        [error] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert "localhost:1 and 127.0.0.1:1 are addresses of the same gateway" in error
        links.follow_directory()
        assert list(links) == [second, other], "it is left for good"
        second.is_registered = False
        directory.known = ("localhost:1", "127.0.0.1:2")
        links.follow_directory()
        assert links.addresses == "127.0.0.1:2,localhost:1", "its other address is not announced any more"


def test_links_to_gateways_are_bounded_and_end_unless_they_are_announced_or_have_accepted_the_node() -> None:
    directory = Directory("127.0.0.1:1", "127.0.0.1:2")
    with links_to(directory) as links:
        for link in links:
            link.is_dialling = False
        _, second = links
        second.is_registered = True
        directory.known = tuple(f"127.0.0.1:{port}" for port in range(3, MAX_GATEWAYS + 10))
        links.follow_directory()
        assert len(links.mailboxes()) == MAX_GATEWAYS
        assert [link.address for link in links][:2] == ["127.0.0.1:2", "127.0.0.1:3"]
