"""``python -m scripts.serving.worker prefill|decode``: runs one node until it is stopped.

The roles never import each other. This root knows both, so that a node can change its role.
"""

from common.system.loading_signals import end_on_signals

if __name__ == "__main__":
    end_on_signals()

import sys
from collections.abc import Mapping, Sequence

from common.config.cli import resolve
from common.config.node import NodeConfig
from common.config.shared import Role
from common.node.loading.loaded_node import RoleFactory
from common.node.worker_context import WorkerContext
from common.node.worker_main import end_process, run
from decode_node import factory as decode
from kv_transfer.transports.factory import TransportSettings
from kv_transfer.transports.ranks.node_transports import NodeTransports
from prefill_node import factory as prefill

HELP: Mapping[str, str] = {
    "prefill": """Compute prompts and hand their KV pages to decode nodes.

\b
Examples:
  prefill --model DIR        the gateway is on this machine
  prefill --model DIR --keys keys/a --gateway 10.0.0.1:8001 --advertise-host 10.0.0.1

An address that other machines reach also needs BATON_CLUSTER_KEY. Logs "registered with the gateway" once it can be
used.""",
    "decode": """Get the KV pages of prompts from prefill nodes and generate the outputs, in one batch.

\b
Examples:
  decode --model DIR        the gateway is on this machine
  decode --model DIR --keys keys/b --gateway 10.0.0.1:8001 --advertise-host 10.0.0.2

An address that other machines reach also needs BATON_CLUSTER_KEY. Logs "registered with the gateway" once it can be
used.""",
}


def open_transports(context: WorkerContext) -> NodeTransports:
    """The transport that the configuration names, over the pools of all ranks."""
    return NodeTransports(
        context.pool,
        TransportSettings.of(context.config, context.incarnation),
        first="writer" if context.config.role == "prefill" else "reader",
        layout=context.layout,
        others=context.other_ranks,
    )


FACTORIES: Mapping[Role, RoleFactory] = {
    "prefill": RoleFactory(open_transports, prefill.build),
    "decode": RoleFactory(open_transports, decode.build),
}


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    command = words[0] if words else ""
    if command not in HELP:
        print("usage: python -m scripts.serving.worker prefill|decode [OPTIONS]", file=sys.stderr)
        return 2
    config = resolve(NodeConfig, words[1:], command=command, help=HELP[command])
    return run(config, FACTORIES, rank_module="scripts.serving.rank")


if __name__ == "__main__":
    end_process(main())
