"""``python -m prefill_node``: one prefill node, dialling the gateway until it is told to stop."""

import sys

from common.config.cli import resolve
from common.config.node import NodeConfig
from common.node.worker_context import Parts
from common.node.worker_main import run
from kv_transfer.send.sender import Sender
from kv_transfer.transports.base import WriterTransport
from kv_transfer.transports.negotiation import TransportSettings, open_writer
from prefill_node.role import PrefillRole
from prefill_node.scheduler import Limits, PrefillScheduler

HELP = "Compute prompts and hand their KV pages to decode nodes."


def open_transport(parts: Parts) -> WriterTransport:
    """The transport that the configuration names, over the process's pool."""
    return open_writer(parts.pool, TransportSettings.of(parts.config, parts.incarnation))


def build(parts: Parts, transport: WriterTransport) -> PrefillRole:
    """The role and its transfer endpoint, over the process's pool and books."""
    config, capacity = parts.config, parts.capacity
    limits = Limits(
        max_running=capacity.num_slots,
        max_queued=capacity.max_queued,
        context_length=capacity.context_length,
        max_prefill_tokens=config.max_prefill_tokens,
        chunk_tokens=capacity.chunk_tokens,
        cut=capacity.cut,
        max_requests=config.prefill_max_requests,
        sharing=parts.sharing,
        max_skip_ahead=config.max_skip_ahead,
    )
    sender = Sender(transport, digest=parts.digest, wants_checksums=config.kv_checksum, clock=parts.clock)
    scheduler = PrefillScheduler(
        parts.cache,
        parts.books,
        limits=limits,
        order=parts.order(),
        eos_token_ids=parts.eos_token_ids,
        is_granted=sender.is_granted,
    )
    return PrefillRole(scheduler, sender, cache=parts.cache, books=parts.books, vocab_size=parts.vocab_size)


def main() -> int:
    config = resolve(NodeConfig, command="prefill", help=HELP)
    return run(config, open_transport, build)


if __name__ == "__main__":
    sys.exit(main())
