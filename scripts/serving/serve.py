"""``serve``: a gateway, prefill nodes and decode nodes on one machine, as one command.

Every part is a process of its own: ``python -m gateway``, ``python -m prefill_node``, ``python -m decode_node``. This
process divides the machine among them, keeps them running (``scripts/serving/supervisor.py``), and reports when a
request succeeds. Logs go to standard error; standard output gets the one line ``ready http://...``.
"""

import asyncio
import dataclasses
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from common.config.cli import CLASSES, resolve
from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.config.options import options_of, to_flags
from common.config.serve import ServeConfig
from common.errors import BatonError, ConfigError
from common.wire.address import in_url
from scripts.serving.cpu_affinity import Share, divide, usable_cores
from scripts.serving.supervisor import Child, Supervisor, say

ROOT = Path(__file__).resolve().parents[2]
HELP = """Serve a model on this machine: a gateway, prefill nodes and decode nodes.

Without --model it serves the small model included in Baton. Prints "ready http://HOST:PORT" once a request has
succeeded; Ctrl-C or SIGTERM stops everything."""
POLL_S, PROGRESS_S = 0.1, 10.0


class NotReady(BatonError):
    """The service was not ready after --ready-timeout."""


def free_port(host: str, port: int, flag: str) -> int:
    """Returns ``port``, or a free port for 0.

    Raises ConfigError: the port is in use, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            host_flag = flag.replace("port", "host")
            raise ConfigError(
                f"cannot bind {host_flag} {host} {flag} {port}: {error.strerror}; choose another with {flag}"
            ) from None
        return int(probe.getsockname()[1])


def with_ports(config: ServeConfig) -> ServeConfig:
    """Replace port 0 by a free port, so that a restarted gateway has the same address."""
    port = free_port(config.host, config.port, "--port")
    control_port = free_port(config.control_host, config.control_port, "--control-port")
    return dataclasses.replace(config, port=port, control_port=control_port)


def with_key(config: ServeConfig) -> ServeConfig:
    """Add a random API key where only tenants have keys: serve itself must send a request to see if it is ready."""
    if config.tenant_keys is None or config.api_key:
        return config
    return dataclasses.replace(config, api_key=secrets.token_hex(32))


def children(config: ServeConfig, shares: Sequence[Share]) -> list[Child]:
    """The processes to run: gateway, prefill nodes, decode nodes; one share of the cores for each node."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    found = [Child("gateway", _argv("gateway", to_flags(GatewayConfig, values)), _environment(config, 1))]
    names = [f"prefill-{i}" for i in range(config.prefill)] + [f"decode-{i}" for i in range(config.decode)]
    first_port = config.http_port
    for number, (name, share) in enumerate(zip(names, shares, strict=True)):
        values |= {
            "http_port": first_port and first_port + number,
            "name": name,
            "gateway": f"{in_url(_local(config.control_host))}:{config.control_port}",
            "threads": share.num_threads,
            "memory_fraction": config.memory_fraction / len(names),
            "record": config.record and f"{config.record}.{name}",
        }
        argv = _argv(name.split("-")[0] + "_node", to_flags(NodeConfig, values))
        found.append(Child(name, argv, _environment(config, share.num_threads), share.cpus))
    return found


def _argv(module: str, flags: list[str]) -> list[str]:
    return [sys.executable, "-m", module, *flags]


def _environment(config: ServeConfig, num_threads: int) -> dict[str, str]:
    """Environment of the children. Options travel on the command line, secrets only here."""
    options = {found.env for cls in CLASSES.values() for found in options_of(cls).values()} | {"BATON_CONFIG"}
    environ = {name: value for name, value in os.environ.items() if name not in options}
    environ |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(num_threads)}
    if (ROOT / "pyproject.toml").exists():  # a checkout rather than an installed package
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH", "")]))
    if config.api_key:
        environ["BATON_API_KEY"] = config.api_key
    if config.cluster_key:
        environ["BATON_CLUSTER_KEY"] = config.cluster_key
    return environ


def shares_of(config: ServeConfig) -> list[Share]:
    """Threads and cores of each node. Nodes on a GPU are not pinned."""
    num_nodes = config.prefill + config.decode
    shares = divide(usable_cores(), num_nodes, config.threads)
    is_cuda = config.device.startswith("cuda") or (config.device == "auto" and Path("/dev/nvidia0").exists())
    return [Share(share.num_threads) for share in shares] if is_cuda else shares


def _local(host: str) -> str:
    """The address at which this machine reaches a listener bound to ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _url(config: ServeConfig) -> str:
    return f"http://{in_url(_local(config.host))}:{config.port}"


# ---- readiness ------------------------------------------------------------------------------------------------------


async def wait_until_ready(config: ServeConfig) -> None:
    """Return once every node is registered and a small request has succeeded.

    Raises NotReady: not within ``ready_timeout``.
    """
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    began = told_at = time.monotonic()
    async with aiohttp.ClientSession(_url(config), headers=headers, timeout=aiohttp.ClientTimeout(60)) as session:
        while (missing := await _missing(session, config)) or (missing := await _failed_request(session, config)):
            now = time.monotonic()
            if now - began > config.ready_timeout:
                raise NotReady(f"not ready after --ready-timeout {config.ready_timeout:g} s; still missing: {missing}")
            if now - told_at > PROGRESS_S:
                told_at = now
                say(f"serve: {now - began:.0f} s, waiting for {missing}")
            await asyncio.sleep(POLL_S)


async def _missing(session: aiohttp.ClientSession, config: ServeConfig) -> str:
    """What is not ready yet, in words; empty once the gateway knows as many nodes as were started."""
    try:
        async with session.get("/ready") as answer:
            is_ready = answer.status == 200
        async with session.get("/v1/workers") as answer:
            workers: Any = await answer.json() if answer.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError):
        return "the gateway"
    ours = [worker for worker in workers.get("workers", []) if worker["model"] == config.served_name]
    roles = [worker["role"] for worker in ours]
    lacking = [
        f"{wanted - roles.count(role)} {role} node{'s' if wanted - roles.count(role) > 1 else ''}"
        for role, wanted in (("prefill", config.prefill), ("decode", config.decode))
        if wanted > roles.count(role)
    ]
    return " and ".join(lacking) or ("" if is_ready else "a pair of nodes that can work together")


async def _failed_request(session: aiohttp.ClientSession, config: ServeConfig) -> str:
    """Why a request for two tokens, one from each node, failed; empty if it succeeded."""
    body = {"model": config.served_name, "prompt": "To be", "max_tokens": 2, "ignore_eos": True, "temperature": 0}
    try:
        async with session.post("/v1/completions", json=body) as answer:
            return "" if answer.status == 200 else f"a first request ({(await answer.text())[:200]})"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"a first request ({error!r})"


# ---- the command ----------------------------------------------------------------------------------------------------


async def serve(config: ServeConfig) -> int:
    """Run until a signal; returns the exit status."""
    shares = shares_of(config)
    supervisor = Supervisor(children(config, shares))
    stopping = asyncio.Event()
    _on_signals(supervisor, stopping)
    threads = sorted({share.num_threads for share in shares})
    say(
        f"serve: starting a gateway, {config.prefill} prefill and {config.decode} decode for {config.served_name}, "
        f"{' or '.join(map(str, threads))} compute threads each{'' if shares[0].cpus else ', not pinned'}"
    )
    running = asyncio.create_task(supervisor.run())
    ready = asyncio.create_task(wait_until_ready(config))
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({running, ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and not ready.exception():
            supervisor.mark_ready()
            tell_ready(_url(config))
            await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
        return _status(running, ready)
    finally:
        ready.cancel()
        await supervisor.stop()
        running.cancel()
        await asyncio.gather(running, ready, return_exceptions=True)


def tell_ready(url: str) -> None:
    """Print the line on standard output; the service continues if that is closed or its disk is full."""
    try:
        print(f"ready {url}", flush=True)
    except OSError as error:
        sys.stdout = None  # otherwise the interpreter fails again when it flushes at exit
        say(f"serve: ready {url}; cannot write to standard output: {error.strerror}")


def _status(running: "asyncio.Task[None]", ready: "asyncio.Task[None]") -> int:
    """The exit status: 0 after a requested stop, otherwise 1 and a message."""
    for work in (running, ready):
        error = work.exception() if work.done() else None
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            if not isinstance(error, BatonError):
                raise error
            say(f"serve: {error}")
            return 1
    return 0


def _on_signals(supervisor: Supervisor, stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():  # second signal: kill everything at once
            supervisor.signal_all(signal.SIGKILL)
            os._exit(130)
        say("serve: stopping")
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)


def main(argv: Sequence[str] | None = None) -> int:
    config = resolve(ServeConfig, argv, command="serve", help=HELP)
    try:
        config = with_ports(with_key(config))
    except ConfigError as error:
        say(f"serve: {error}")
        return 2
    return asyncio.run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
