"""Builds the decode role from the parts of a node process."""

from dataclasses import fields

from common.node.worker_context import WorkerContext
from decode_node.moves import OutgoingMoves
from decode_node.role import DecodeRole
from decode_node.scheduler import DecodeLimits, DecodeScheduler
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.transports.base import TransportEnds


def build(context: WorkerContext, ends: TransportEnds) -> DecodeRole:
    """Build the role with its scheduler and its end of the transfer plane."""
    config, prefill_limits = context.config, context.prefill_limits
    limits = DecodeLimits(
        **{field.name: getattr(prefill_limits, field.name) for field in fields(prefill_limits)},
        is_mixed=config.enable_mixed_chunk,
        is_retracted_by_priority=config.is_retracted_by_priority,
        resume_tokens=config.resume_prefill_threshold,
        reserved_tokens=config.num_reserved_decode_tokens,
    )
    receiver = Receiver(
        ends.reader,
        context.allocator,
        name=config.node_name,
        digest=context.digest,
        checksums=context.checksums,
    )
    scheduler = DecodeScheduler(
        context.cache,
        context.allocator,
        limits=limits,
        ordering=context.ordering(),
        eos_token_ids=context.eos_token_ids,
        is_connected=receiver.is_connected,
    )

    def open_sender() -> Sender:
        return Sender(
            ends.writer,
            digest=context.digest,
            checksums=context.checksums,
            clock=context.clock,
            max_pages=context.longest_transfer,
        )

    return DecodeRole(
        scheduler,
        receiver,
        OutgoingMoves(open_sender, context.allocator, context.cache.page_size),
        cache=context.cache,
        vocab_size=context.vocab_size,
        adapters=context.adapters,
        stream_interval=config.stream_interval,
    )
