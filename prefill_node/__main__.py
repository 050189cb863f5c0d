"""``python -m prefill_node``: one prefill node, dialling the gateway until it is told to stop."""

import sys

from common.cli import resolve
from common.config import NodeConfig
from common.new_token_ratio import constants_from
from common.node.process import Parts, run
from common.plugins import load_policy
from common.policy import make_order
from common.sharing import sharing_limits_from
from kv_transfer.sender import Sender
from kv_transfer.transports.base import WriterTransport
from kv_transfer.transports.choice import Settings, open_writer
from prefill_node.role import PrefillRole
from prefill_node.scheduler import Limits, PrefillScheduler

HELP = "Compute prompts and hand their KV pages to decode nodes."


def open_transport(parts: Parts) -> WriterTransport:
    """The transport that the configuration names, over the process's pool."""
    config = parts.config
    key = (config.cluster_key or "").encode()
    return open_writer(parts.pool, Settings(config.transport, parts.incarnation, config.data_host, key))


def build(parts: Parts, transport: WriterTransport) -> PrefillRole:
    """The role and its transfer endpoint, over the process's pool and books."""
    config, capacity = parts.config, parts.capacity
    constants, sharing = constants_from(parts.environ), sharing_limits_from(parts.environ)
    limits = Limits(
        max_running=capacity.num_slots,
        max_queued=capacity.max_queued,
        max_prefill_tokens=config.max_prefill_tokens,
        chunk_tokens=capacity.chunk_tokens,
        cut=capacity.cut,
        max_requests=config.prefill_max_requests,
        sharing=sharing,
        max_skip_ahead=config.max_skip_ahead,
    )
    sender = Sender(transport, digest=parts.digest, wants_checksums=config.kv_checksum, clock=parts.clock)
    scheduler = PrefillScheduler(
        parts.cache,
        parts.books,
        limits=limits,
        order=make_order(
            config, parts.cache, own_policy=load_policy(config.schedule_policy), sharing=sharing, constants=constants
        ),
        eos_token_ids=parts.eos_token_ids,
        is_granted=sender.is_granted,
    )
    return PrefillRole(scheduler, sender, cache=parts.cache, books=parts.books, vocab_size=parts.vocab_size)


def main() -> int:
    config = resolve(NodeConfig, command="prefill", help=HELP)
    return run(config, open_transport, build)


if __name__ == "__main__":
    sys.exit(main())
