"""Builds the prefill role from the parts of a node process."""

from common.node.worker_context import WorkerContext
from common.scheduling.prefill_adder import PrefillLimits
from kv_transfer.send.sender import Sender
from kv_transfer.transports.base import TransportEnds
from prefill_node.role import PrefillRole
from prefill_node.scheduler import PrefillScheduler


def build(context: WorkerContext, ends: TransportEnds) -> PrefillRole:
    """Build the role with its scheduler and its end of the transfer plane."""
    config, capacity = context.config, context.capacity
    limits = PrefillLimits(
        max_running=capacity.num_slots,
        max_queued=capacity.max_queued,
        context_length=capacity.context_length,
        max_prefill_tokens=config.max_prefill_tokens,
        chunk_tokens=capacity.chunk_tokens,
        alignment=capacity.alignment,
        max_requests=config.prefill_max_requests,
        sharing=context.sharing,
        max_skip_ahead=config.max_skip_ahead,
        long_prompts=context.long_prompts,
        kv_window=context.kv_window,
    )
    sender = Sender(
        ends.writer,
        digest=context.digest,
        checksums=context.checksums,
        clock=context.clock,
        max_pages=context.longest_transfer,
    )
    scheduler = PrefillScheduler(
        context.cache,
        context.allocator,
        limits=limits,
        ordering=context.ordering(),
        eos_token_ids=context.eos_token_ids,
        is_granted=sender.is_granted,
    )
    return PrefillRole(
        scheduler,
        sender,
        cache=context.cache,
        allocator=context.allocator,
        vocab_size=context.vocab_size,
        adapters=context.adapters,
    )
