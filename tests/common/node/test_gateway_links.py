"""The links of a node to the gateways of its directory: which there are, and when one is left."""

import contextlib
from collections.abc import Iterator

import pytest
import zmq

from common.clock import MonotonicClock
from common.discovery.gateway_directory import MAX_GATEWAYS
from common.node.endpoint import ControlEndpoint, listen_mailbox
from common.node.gateways.gateway_links import GatewayLinks
from common.wire.messages import Registered


class Directory:
    """Gateways that come and go."""

    is_fixed = False
    description = "a directory"

    def __init__(self, *known: str) -> None:
        self.known = known

    def addresses(self) -> tuple[str, ...]:
        return self.known


@contextlib.contextmanager
def links_to(directory: Directory) -> Iterator[GatewayLinks]:
    """Links that nothing is received from."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = ControlEndpoint(context, "n" * 32, listen_mailbox(context, "n" * 32, "127.0.0.1", 0, keys=None))
    links = GatewayLinks(
        directory, endpoint, register=lambda: None, clock=MonotonicClock(), poller=zmq.Poller(), room=1,
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
        assert "localhost:1 and 127.0.0.1:1 are addresses of one gateway" in error
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
