"""``python -m gateway``: resolves the configuration, fetches the tokenizer files, serves until a signal."""

from common.system.loading_signals import end_on_signals

if __name__ == "__main__":
    end_on_signals()

import asyncio
import gc
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import uvloop
import zmq

from common.config.cli import resolve
from common.config.gateway import GatewayConfig
from common.errors import ConfigError
from common.logs import configure_logging
from common.system.open_files import raise_open_file_limit
from gateway.server import GRACE_S, Gateway
from gateway.workers.served_models import load_models, model_folders

log = logging.getLogger("gateway")

HELP = """Speak HTTP and text, choose nodes, relay tokens.

\b
Examples:
  gateway --model DIR        nodes of this machine connect to port 8001
  gateway --model DIR --keys keys/a --host 10.0.0.1 --control-host 10.0.0.1

Logs "listening http://HOST:PORT", and answers /ready with 200 once a prefill node and a decode node have registered."""
#: Net allocations before young objects are searched for cycles, and how many searches of younger ones come before one
#: of older ones. The objects of the requests in flight are far more than Python's default of 700, and none of them is
#: part of a cycle when its request has ended. A search of all objects takes about a second with 100,000 requests in
#: flight, and stops all streams; it comes after more than a million requests.
GC_THRESHOLDS = 20_000, 10, 100
#: Seconds after which slow work on a thread lets the event loop go on, which waits once for each event of a connection.
#: Python's default is ten times as long.
SWITCH_INTERVAL_S = 0.0005
#: Threads for slow work. More would delay the event loop more; a second one lets short answers pass a very long one.
NUM_THREADS = 2


def yield_to(loop: asyncio.AbstractEventLoop) -> None:
    """Let slow work on threads, such as formatting long answers, delay the event loop little."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loop.set_default_executor(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="slow-work"))


async def serve(gateway: Gateway, drain_timeout_s: float) -> None:
    """Serve until SIGTERM, after which requests may end, or SIGINT. A second signal ends them."""
    stop: asyncio.Future[float] = asyncio.Future()
    loop = asyncio.get_running_loop()
    yield_to(loop)

    def on_signal(grace_s: float) -> None:
        if stop.done():
            gateway.end_grace()
        else:
            stop.set_result(grace_s)

    loop.add_signal_handler(signal.SIGTERM, on_signal, drain_timeout_s)
    loop.add_signal_handler(signal.SIGINT, on_signal, GRACE_S)
    await gateway.start()
    gc.collect()
    gc.freeze()  # what exists by now lives as long as the process
    gc.set_threshold(*GC_THRESHOLDS)
    log.info("nodes dial %s", gateway.control_address)
    log.info("listening %s", gateway.http_address)
    grace_s = await stop
    log.info("stopping when all requests have ended, or in %g s", grace_s)
    await gateway.stop(grace_s)
    for number in (signal.SIGTERM, signal.SIGINT):  # another signal would kill the process, which ends anyway
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    log.info("stopped")


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    config = resolve(GatewayConfig, argv, command="gateway", help=HELP)
    raise_open_file_limit()
    writer = configure_logging("gateway", level=config.log_level, log_format=config.log_format)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts are tokenized one by one; threads would only wait
    try:
        gateway = Gateway(config, load_models(config, model_folders(config)))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(gateway, config.drain_timeout))
    except (ConfigError, OSError, zmq.ZMQError) as error:
        log.error("%s", error)
        return error.exit_status if isinstance(error, ConfigError) else 2
    except Exception:  # which the interpreter would report too late: after the writer is closed
        log.exception("the gateway failed")
        return 1
    finally:
        if writer is not None:
            writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
