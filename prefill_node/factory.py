"""Builds the prefill role from the parts of a node process."""

from common.node.worker_context import WorkerContext
from kv_transfer.send.sender import Sender
from kv_transfer.transports.base import TransportEnds
from prefill_node.role import PrefillRole
from prefill_node.scheduler import PrefillScheduler


def build(context: WorkerContext, ends: TransportEnds) -> PrefillRole:
    """Build the role with its scheduler and its end of the transfer plane."""
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
        limits=context.prefill_limits,
        ordering=context.ordering(),
        eos_token_ids=context.eos_token_ids,
        is_granted=sender.is_granted,
    )
    return PrefillRole(
        scheduler,
        sender,
        cache=context.cache,
        vocab_size=context.vocab_size,
        adapters=context.adapters,
    )
