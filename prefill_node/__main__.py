"""``python -m prefill_node``: runs one prefill node until it is stopped."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a process that is still loading without a traceback

from common.config.cli import resolve
from common.config.node import NodeConfig
from common.node.worker_context import WorkerContext
from common.node.worker_main import end_process, run
from kv_transfer.send.sender import Sender
from kv_transfer.transports.base import WriterTransport
from kv_transfer.transports.negotiation import TransportSettings, open_writer
from prefill_node.role import PrefillRole
from prefill_node.scheduler import PrefillLimits, PrefillScheduler

HELP = "Compute prompts and hand their KV pages to decode nodes."


def open_transport(context: WorkerContext) -> WriterTransport:
    """The transport that the configuration names, over the pool of the process."""
    return open_writer(context.pool, TransportSettings.of(context.config, context.incarnation))


def build(context: WorkerContext, transport: WriterTransport) -> PrefillRole:
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
    )
    sender = Sender(transport, digest=context.digest, wants_checksums=config.kv_checksum, clock=context.clock)
    scheduler = PrefillScheduler(
        context.cache,
        context.allocator,
        limits=limits,
        ordering=context.ordering(),
        eos_token_ids=context.eos_token_ids,
        is_granted=sender.is_granted,
    )
    return PrefillRole(
        scheduler, sender, cache=context.cache, allocator=context.allocator, vocab_size=context.vocab_size
    )


def main() -> int:
    config = resolve(NodeConfig, command="prefill", help=HELP)
    return run(config, open_transport, build)


if __name__ == "__main__":
    end_process(main())
