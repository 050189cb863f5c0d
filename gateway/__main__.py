"""``python -m gateway``: resolves the configuration, fetches the tokenizer files, serves until a signal."""

import asyncio
import logging
import os
import signal
import sys

import uvloop
import zmq

from common.config.cli import resolve
from common.config.gateway import GatewayConfig
from common.errors import ConfigError
from gateway.server import Gateway
from gateway.workers.served_models import model_folders

log = logging.getLogger("gateway")


async def serve(gateway: Gateway) -> None:
    """Serves until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await gateway.start()
    log.info("nodes dial %s", gateway.control_address)
    log.info("listening %s", gateway.http_address)
    await stop.wait()
    log.info("stopping")
    await gateway.stop()


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = resolve(GatewayConfig, argv, command="gateway", help="Speak HTTP and text, choose nodes, relay tokens.")
    logging.basicConfig(
        level=config.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s gateway %(message)s",
        datefmt="%H:%M:%S",
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts are tokenized one by one; threads would only wait
    try:
        gateway = Gateway(config, model_folders(config))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(gateway))
    except (ConfigError, OSError, zmq.ZMQError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
