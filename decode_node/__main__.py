"""``python -m decode_node``: one decode node, dialling the gateway until it is told to stop."""

import sys

from common.config.cli import resolve
from common.config.node import NodeConfig
from common.node.worker_context import Parts
from common.node.worker_main import run
from common.scheduling.new_token_ratio import NewTokenRatio
from decode_node.role import DecodeRole
from decode_node.scheduler import DecodeScheduler, Limits
from kv_transfer.receive.receiver import Receiver
from kv_transfer.transports.base import ReaderTransport
from kv_transfer.transports.negotiation import TransportSettings, open_reader

HELP = "Receive prompts from prefill nodes and decode them, token by token, in one batch."


def open_transport(parts: Parts) -> ReaderTransport:
    """The transport that the configuration names, over the process's pool."""
    return open_reader(parts.pool, TransportSettings.of(parts.config, parts.incarnation))


def build(parts: Parts, transport: ReaderTransport) -> DecodeRole:
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
        is_mixed=config.enable_mixed_chunk,
        sharing=parts.sharing,
        clip_tokens=parts.constants.clip,
        max_skip_ahead=config.max_skip_ahead,
        is_retracted_by_priority=config.is_retracted_by_priority,
        resume_tokens=config.resume_prefill_threshold,
        reserved_tokens=config.num_reserved_decode_tokens,
    )
    receiver = Receiver(
        transport,
        parts.books,
        name=config.node_name,
        digest=parts.digest,
        wants_checksums=config.kv_checksum,
    )
    scheduler = DecodeScheduler(
        parts.cache,
        parts.books,
        limits=limits,
        order=parts.order(),
        ratio=NewTokenRatio(parts.constants, config.schedule_conservativeness),
        eos_token_ids=parts.eos_token_ids,
        is_connected=receiver.is_connected,
    )
    return DecodeRole(
        scheduler,
        receiver,
        cache=parts.cache,
        books=parts.books,
        vocab_size=parts.vocab_size,
        stream_interval=config.stream_interval,
    )


def main() -> int:
    config = resolve(NodeConfig, command="decode", help=HELP)
    return run(config, open_transport, build)


if __name__ == "__main__":
    sys.exit(main())
