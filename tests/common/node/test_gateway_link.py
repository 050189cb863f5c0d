"""The load that a node passes on between its gateways."""

from common.node.gateways.gateway_link import total_load
from common.wire.messages import ClientLoad


def test_the_load_of_several_gateways_is_added():
    loads = [ClientLoad(1.0, 100.0, 10_000.0, 10.0), ClientLoad(0.5, 0.0, 0.0, 5.0), ClientLoad()]
    assert total_load(loads) == ClientLoad(1.5, 100.0, 10_000.0, 15.0)


def test_a_node_with_one_gateway_tells_it_of_no_other_load():
    assert total_load([]) == ClientLoad()
