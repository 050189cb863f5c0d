"""A rank other than 0, as a process that rank 0 has started.

It ends when its connection to rank 0 does, whatever ended that, so that no rank outlives its node. While it
loads weights, it does not notice that: if rank 0 is killed, the kernel kills it too.
"""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from common.errors import BatonError, ConfigError
from common.logs import configure_logging
from common.node.tensor_parallel.channel import (
    AdapterRead,
    Join,
    LoadModel,
    Prepared,
    RankChannel,
    ReadAdapter,
    Step,
    Transfer,
    path_of,
)

if TYPE_CHECKING:
    from common.engine.kv_pool import KVPool
    from common.engine.models.protocol import CausalModel
    from common.engine.tensor_parallel.group import RankGroup
    from common.engine.tensor_parallel.rank_executor import RankExecutor

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # Linux; Python has no name for it


#: Serves one end of a rank's transports, over a connection to rank 0 and over the rank's pool, until rank 0 closes it.
ServeTransfers = Callable[[socket.socket, "KVPool"], None]


def main(serve_transfers: ServeTransfers) -> int:
    """Run this rank over the socket whose descriptor is the first word of the command line.

    Returns:
        The exit status: 1 if it has failed, 0 if rank 0 has ended the connection or has been told why this rank cannot
        load its part of the model.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains first, and then ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = RankChannel(socket.socket(fileno=int(sys.argv[1])))
    writer = None
    try:
        load, _ = channel.receive()
        assert isinstance(load, LoadModel)
        writer = configure_logging(load.name, level=load.log_level, log_format=load.log_format)
        _serve(channel, load, serve_transfers)
    except (EOFError, ConnectionError):
        return 0
    except BatonError as error:
        log.info("this rank ends: %s", error)
        return 1
    except Exception:
        log.exception("this rank failed")
        return 1
    finally:
        if writer is not None:
            writer.close()
    return 0


def _serve(channel: RankChannel, load: LoadModel, serve_transfers: ServeTransfers) -> None:
    """Load this rank's part of the model, and do what rank 0 says until it ends the connection.

    Raises:
        EOFError: it has.
    """
    try:
        make_model = _load_model(load)
    except (BatonError, MemoryError) as error:
        channel.send(Prepared(str(error) or "it has too little memory"))
        return
    except Exception as error:  # the library's code, and that of checkpoints, may raise anything
        log.exception("the model cannot be loaded")
        channel.send(Prepared(f"{type(error).__name__}: {error}"))
        return
    channel.send(Prepared())
    join, (store,) = channel.receive()
    assert isinstance(join, Join)

    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from common.engine.kv_pool import KVPool
    from common.engine.tensor_parallel.group import open_group
    from common.engine.tensor_parallel.rank_executor import RankExecutor
    from common.engine.tensor_parallel.shard import Shard

    shard, device = Shard(load.rank, load.num_ranks), torch.device(load.device)
    try:
        pool = KVPool(join.layout, join.num_pages, device, groups=join.groups, num_window_pages=join.num_window_pages)
    except (OSError, ValueError, RuntimeError) as error:  # mmap's and torch's, when there is too little memory
        channel.send(Prepared(str(error).splitlines()[0]))
        return
    channel.send(Prepared())
    group = open_group(FileStore(path_of(store), shard.size), shard, device, timeout_s=join.timeout_s)
    executor = RankExecutor(make_model(group), pool, load.attention)
    gc.collect()
    gc.freeze()
    _handle_messages(channel, executor, pool, serve_transfers)


def _handle_messages(
    channel: RankChannel, executor: "RankExecutor", pool: "KVPool", serve_transfers: ServeTransfers
) -> None:
    """Do what rank 0 says until it ends the connection.

    Raises:
        EOFError: it has.
    """
    adapters = ThreadPoolExecutor(1, thread_name_prefix="adapters")
    adapters.submit(int)  # start the thread now: later, the process may have no further one
    while True:
        message, descriptors = channel.receive()
        if isinstance(message, Transfer):
            if descriptors:  # otherwise this process has none left, and rank 0 finds the connection closed
                _start_transfers(serve_transfers, socket.socket(fileno=descriptors[0]), pool)
            continue
        if isinstance(message, ReadAdapter):
            adapters.submit(_read_adapter, channel, executor, message)
            continue
        assert isinstance(message, Step)
        if message.dropped:  # on the thread, which may still be reading one that another rank could not read
            adapters.submit(executor.drop_adapters, message.dropped)
        executor.run(*message.arrays(), message.adapters)


def _read_adapter(channel: RankChannel, executor: "RankExecutor", order: ReadAdapter) -> None:
    """On a thread, while steps go on: read a LoRA adapter, and answer."""
    problem, root = "", None if order.root is None else Path(order.root)
    try:
        executor.read_adapter(order.number, order.digest, Path(order.folder), max_rank=order.max_rank, root=root)
    except ConfigError as error:
        problem = str(error)
    except Exception as error:
        log.exception("the adapter cannot be loaded")
        problem = f"{order.folder}: cannot be loaded ({type(error).__name__})"
    with contextlib.suppress(OSError):  # rank 0 has ended
        channel.send(AdapterRead(order.number, problem))


def _start_transfers(serve: ServeTransfers, connection: socket.socket, pool: "KVPool") -> None:
    from common.engine.device_copies import current_device

    def run() -> None:
        with current_device(pool.device):
            serve(connection, pool)

    try:
        threading.Thread(target=run, name="rank-transfers", daemon=True).start()
    except RuntimeError as error:  # this process may have no further thread; rank 0 finds the connection closed
        log.error("this rank can transfer no pages: %s", error)
        connection.close()


def _load_model(load: LoadModel) -> "Callable[[RankGroup | None], CausalModel]":
    """Load this rank's part; return what makes the model of it.

    Raises:
        ConfigError: the weights do not match the model, the model is another one than rank 0 has read, or the device
            has too little memory.
    """
    import torch

    from common.engine.models.implementation import ModelSource, load_config, load_model
    from common.engine.tensor_parallel.shard import Shard

    source = ModelSource(
        load.folder,
        implementation=load.implementation,
        overrides=load.overrides,
        trust_remote_code=load.trust_remote_code,
        has_dummy_weights=load.has_dummy_weights,
    )
    config = load_config(source)
    if config.digest != load.digest:
        raise ConfigError(f"{load.folder} has changed since this node was started; start it again")
    torch.set_num_threads(load.num_threads)
    device = torch.device(load.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current one
    shard = Shard(load.rank, load.num_ranks)
    try:
        return load_model(config, load.dtype, device, weight_dtype=load.weight_dtype, shard=shard)
    except torch.OutOfMemoryError as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def end_rank(status: int) -> NoReturn:
    """End this process without waiting for the threads of torch."""
    logging.shutdown()
    os._exit(status)
