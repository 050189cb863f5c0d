"""``python -m decode_node``: runs one decode node until it is stopped."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a process that is still loading without a traceback

from common.config.cli import resolve
from common.config.node import NodeConfig
from common.node.worker_context import WorkerContext
from common.node.worker_main import end_process, run
from common.scheduling.new_token_ratio import NewTokenRatio
from decode_node.role import DecodeRole
from decode_node.scheduler import DecodeLimits, DecodeScheduler
from kv_transfer.receive.receiver import Receiver
from kv_transfer.transports.base import ReaderTransport
from kv_transfer.transports.negotiation import TransportSettings, open_reader

HELP = "Receive prompts from prefill nodes and decode them, token by token, in one batch."


def open_transport(context: WorkerContext) -> ReaderTransport:
    """The transport that the configuration names, over the pool of the process."""
    return open_reader(context.pool, TransportSettings.of(context.config, context.incarnation))


def build(context: WorkerContext, transport: ReaderTransport) -> DecodeRole:
    """Build the role with its scheduler and its end of the transfer plane."""
    config, capacity = context.config, context.capacity
    limits = DecodeLimits(
        max_running=capacity.num_slots,
        max_queued=capacity.max_queued,
        context_length=capacity.context_length,
        max_prefill_tokens=config.max_prefill_tokens,
        chunk_tokens=capacity.chunk_tokens,
        alignment=capacity.alignment,
        max_requests=config.prefill_max_requests,
        is_mixed=config.enable_mixed_chunk,
        sharing=context.sharing,
        clip_tokens=context.constants.clip,
        max_skip_ahead=config.max_skip_ahead,
        is_retracted_by_priority=config.is_retracted_by_priority,
        resume_tokens=config.resume_prefill_threshold,
        reserved_tokens=config.num_reserved_decode_tokens,
    )
    receiver = Receiver(
        transport,
        context.allocator,
        name=config.node_name,
        digest=context.digest,
        wants_checksums=config.kv_checksum,
    )
    scheduler = DecodeScheduler(
        context.cache,
        context.allocator,
        limits=limits,
        ordering=context.ordering(),
        ratio=NewTokenRatio(context.constants, config.schedule_conservativeness),
        eos_token_ids=context.eos_token_ids,
        is_connected=receiver.is_connected,
    )
    return DecodeRole(
        scheduler,
        receiver,
        cache=context.cache,
        allocator=context.allocator,
        vocab_size=context.vocab_size,
        stream_interval=config.stream_interval,
    )


def main() -> int:
    config = resolve(NodeConfig, command="decode", help=HELP)
    return run(config, open_transport, build)


if __name__ == "__main__":
    end_process(main())
