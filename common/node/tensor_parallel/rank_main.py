"""``python -m common.node.tensor_parallel.rank_main DESCRIPTOR``: a rank other than 0, which rank 0 has started.

It ends when its connection to rank 0 does, whatever ended that, so that no rank outlives its node. While it
loads weights, it does not notice that: if rank 0 is killed, the kernel kills it too.
"""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from common.errors import BatonError, ConfigError
from common.logs import configure_logging
from common.node.tensor_parallel.channel import Join, Load, Loaded, RankChannel, Step, path_of

if TYPE_CHECKING:
    from common.engine.models.config import ModelConfig
    from common.engine.models.decoder import DecoderWeights

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # Linux; Python has no name for it


def main() -> int:
    """Returns the exit status: 0 if rank 0 has ended the connection, else 1."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains first, and then ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = RankChannel(socket.socket(fileno=int(sys.argv[1])))
    writer = None
    try:
        load, _ = channel.receive()
        assert isinstance(load, Load)
        writer = configure_logging(load.name, level=load.log_level, log_format=load.log_format)
        _serve(channel, load)
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


def _serve(channel: RankChannel, load: Load) -> None:
    """Load this rank's part of the model, and compute the steps of rank 0 until it ends the connection.

    Raises:
        EOFError: it has.
    """
    from common.engine.models.config import ModelConfig

    try:
        config = ModelConfig.load(load.folder)
        weights = _load_weights(load, config)
    except (BatonError, MemoryError) as error:
        channel.send(Loaded(str(error) or "it has too little memory"))
        return
    channel.send(Loaded())
    join, (store, memory) = channel.receive()
    assert isinstance(join, Join)

    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from common.engine.kv_pool import KVPool
    from common.engine.tensor_parallel.group import open_group
    from common.engine.tensor_parallel.rank_executor import RankExecutor
    from common.engine.tensor_parallel.shard import Shard

    shard, device = Shard(load.rank, load.num_ranks), torch.device(load.device)
    pool = KVPool(config.layout(load.page_size, load.dtype), join.num_pages, device, fd=memory)
    group = open_group(FileStore(path_of(store), shard.size), shard, device, timeout_s=join.timeout_s)
    executor = RankExecutor(config, weights, pool, shard=shard, group=group, attention=load.attention)
    gc.collect()
    gc.freeze()
    while True:
        step, _ = channel.receive()
        assert isinstance(step, Step)
        executor.run(*step.arrays())


def _load_weights(load: Load, config: "ModelConfig") -> "DecoderWeights":
    """Raises ConfigError: the weights do not match the model, or the device has too little memory."""
    import torch

    from common.engine.models.weights import load_weights
    from common.engine.tensor_parallel.shard import Shard

    torch.set_num_threads(load.num_threads)
    try:
        weights = load_weights(config, load.dtype, torch.device(load.device), Shard(load.rank, load.num_ranks))
        weights.pack(load.weight_dtype)
    except torch.OutOfMemoryError as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return weights


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # without waiting for the threads of torch
