"""A process may open as many files, and as many ZMQ sockets, as connections to a thousand nodes take."""

import subprocess
import sys

import zmq

from common.config.node import NodeConfig
from common.node.endpoint import open_endpoint
from common.wire.messages import FromGateway

PROGRAM = """
import resource
from common.system.open_files import raise_open_file_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
assert raise_open_file_limit() == hard
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard), raise_open_file_limit() == hard)
"""


def test_the_limit_of_open_files_becomes_the_most_that_is_allowed():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "True"]


def test_a_node_can_dial_more_prefill_nodes_than_zmq_has_sockets_for_by_default():
    endpoint = open_endpoint(NodeConfig(role="decode", insecure=True), None)
    with zmq.Context() as usual:
        num_nodes = usual.get(zmq.MAX_SOCKETS) // 3 + 1
    try:
        dialled = [endpoint.dial(FromGateway, "127.0.0.1:9", b"") for _ in range(num_nodes)]
        for mailbox in dialled:
            mailbox.close()
    finally:
        endpoint.close()
