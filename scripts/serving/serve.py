"""``serve``: a gateway, prefill nodes and decode nodes on one machine, as one command.

Every part is a process of its own: ``python -m gateway``, ``python -m scripts.serving.worker prefill|decode``. This
process divides the machine among them, keeps them running (``scripts/serving/supervisor.py``), and reports when a
request succeeds. Logs go to standard error; standard output gets the one line ``ready http://...``, for programs.
"""

import asyncio
import contextlib
import dataclasses
import http.client
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config.cli import CLASSES, resolve
from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.config.options import options_of, to_flags
from common.config.serve import ServeConfig
from common.errors import BatonError, ConfigError
from common.model_folder import find_checkpoint
from common.reminder import Reminder
from common.system.cpu_cores import usable_cores
from common.system.loading_signals import end_on_signals
from common.system.python_environ import python_environ
from common.wire.address import cannot_bind, in_url
from common.wire.curve import draw_keys
from gateway.http.access.tls import make_tls_context
from gateway.siblings.connection import is_same_user
from gateway.siblings.group import GatewayGroup
from scripts.serving.cpu_affinity import Share, divide
from scripts.serving.output import Output, ServeOutput
from scripts.serving.supervisor import REFUSED, Child, ChildFailed, Supervisor

log = logging.getLogger(__name__)

HELP = """Serve a model on this machine: a gateway, prefill nodes and decode nodes.

Without --model it serves the small model included in Baton. Prints "ready http://HOST:PORT" once a request has
succeeded; Ctrl-C or SIGTERM stops everything.

\b
Examples:
  serve
  serve --model Qwen/Qwen3-0.6B --prefill 2 --decode 2
  serve --model DIR --device cpu --max-total-tokens 50000 --port 8080"""
POLL_S, CALL_TIMEOUT_S = 0.1, 60.0
BACKLOG, MAX_PROBES = 1024, 100
#: Nodes that are named where they are not ready.
MAX_NAMED = 3

LISTENING_PORTS = range(20_000, 30_000)
"""Above the ports of Ray's workers, below the node ports of Kubernetes."""
_listening_ports = itertools.islice(itertools.cycle(LISTENING_PORTS), secrets.randbelow(len(LISTENING_PORTS)), None)


class NotReady(BatonError):
    """The service was not ready after --ready-timeout."""


def bind(host: str, port: int, flag: str) -> socket.socket:
    """Return a socket that listens on the port, or on a free one for 0.

    Raises ConfigError: the port is in use or not permitted, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise cannot_bind(flag.replace("port", "host"), host, flag, port, error) from None
    return listener


def free_port(host: str, port: int, flag: str) -> int:
    """Return ``port``, or for 0 a free port, never the same one twice. Raises ConfigError as ``bind``.

    The free port lies below those that the system gives to outgoing connections, where it can: any connection could
    take one of them before the process that is meant to listen there has started.
    """
    if port == 0 and _first_outgoing_port() >= LISTENING_PORTS.stop:
        for candidate in itertools.islice(_listening_ports, MAX_PROBES):
            with contextlib.suppress(ConfigError), bind(host, candidate, flag):
                return candidate
    with bind(host, port, flag) as probe:
        return int(probe.getsockname()[1])


def _first_outgoing_port() -> int:
    """The lowest port that the system gives to outgoing connections."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 49152  # RFC 6335, section 6: where systems without this file begin


def with_ports(config: ServeConfig, listener: socket.socket | None = None) -> ServeConfig:
    """Replace port 0 by a free port, so that a restarted gateway has the same address.

    Args:
        listener: what several gateways share, bound to ``--port``.
    """
    bound = free_port(config.host, config.port, "--port") if listener is None else listener.getsockname()[1]
    control_port = free_port(config.control_host, config.control_port, "--control-port")
    return dataclasses.replace(config, port=bound, control_port=control_port)


def with_key(config: ServeConfig) -> ServeConfig:
    """Add a random API key where all keys are hashed: serve itself must send a request to see if it is ready."""
    if config.api_key_file is None or config.api_key:
        return config
    return dataclasses.replace(config, api_key=secrets.token_hex(32))


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayPlace:
    """Where nodes and other gateways reach one gateway.

    Attributes:
        control: its control port.
        group: its place among several gateways, which share one listening socket; None if it is the only one.
    """

    name: str
    control: int
    group: GatewayGroup | None = None


def gateway_places(config: ServeConfig) -> list[GatewayPlace]:
    """The gateways to run: one with the ports of the configuration, or several with control ports of their own."""
    if config.workers == 1:
        return [GatewayPlace("gateway", config.control_port)]
    name = secrets.token_hex(16)
    controls = [config.control_port]
    controls += [free_port(config.control_host, 0, "--control-port") for _ in range(1, config.workers)]
    return [
        GatewayPlace(f"gateway-{i}", port, GatewayGroup(name, i, config.workers)) for i, port in enumerate(controls)
    ]


def children(
    config: ServeConfig,
    shares: Sequence[Share],
    gateways: Sequence[GatewayPlace] = (),
    listener: socket.socket | None = None,
) -> list[Child]:
    """The processes to run: gateways, prefill nodes, decode nodes; one share of the cores for each node."""
    gateways = gateways or gateway_places(config)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    gateway_keys, node_keys = _keys_of(config)
    environ = _environment(config, 1, gateway_keys)
    if config.admin_api_key:
        environ["BATON_ADMIN_API_KEY"] = config.admin_api_key
    found: list[Child] = []
    for place in gateways:
        own = {**values, "control_port": place.control, "prefill": (), "decode": ()}  # of serve, these are numbers
        fds: tuple[int, ...] = ()
        if place.group is not None:
            assert listener is not None
            fds = (listener.fileno(),)
            own |= {"group": str(place.group), "listen_fd": fds[0]}
            if place.group.index > 0:  # the first alone changes roles, or the others would at the same time
                own |= {"auto_roles": False, "auto_roles_per_hour": GatewayConfig.auto_roles_per_hour}
        found.append(Child(place.name, _argv("gateway", to_flags(GatewayConfig, own)), environ, fds=fds))
    names = node_names(config)
    first_port = config.http_port
    for number, (name, share) in enumerate(zip(names, shares, strict=True)):
        values |= {
            "http_port": first_port and first_port + number,
            "name": name,
            "gateway": ",".join(f"{in_url(_local(config.control_host))}:{place.control}" for place in gateways),
            "threads": share.num_threads,
            "memory_fraction": round(config.memory_fraction / len(names), 9),
            "record": config.record and f"{config.record}.{name}",
        }
        argv = _argv("scripts.serving.worker", [name.split("-")[0], *to_flags(NodeConfig, values)])
        found.append(Child(name, argv, _environment(config, share.num_threads, node_keys), share.cpus))
    return found


def node_names(config: ServeConfig) -> list[str]:
    """Names of the nodes, which they keep when they change their roles."""
    return [f"prefill-{i}" for i in range(config.prefill)] + [f"decode-{i}" for i in range(config.decode)]


def _argv(module: str, flags: list[str]) -> list[str]:
    return [sys.executable, "-m", module, *flags]


def _keys_of(config: ServeConfig) -> tuple[str, str]:
    """Values of ``--keys`` for the gateway and for nodes: new keys in memory, unless a folder is given."""
    if config.insecure or config.keys:
        return config.keys or "", config.keys or ""
    gateway, node = draw_keys()
    return gateway.to_json(), node.to_json()


def _environment(config: ServeConfig, num_threads: int, keys: str) -> dict[str, str]:
    """Environment of the children. Options travel on the command line, secrets only here."""
    options = {found.env for cls in CLASSES.values() for found in options_of(cls).values()} | {"BATON_CONFIG"}
    environ = {name: value for name, value in os.environ.items() if name not in options}
    environ = python_environ(environ) | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(num_threads)}
    if config.api_key:
        environ["BATON_API_KEY"] = config.api_key
    if keys:
        environ["BATON_KEYS"] = keys
    if config.cluster_key:
        environ["BATON_CLUSTER_KEY"] = config.cluster_key
    return environ


def shares_of(config: ServeConfig) -> list[Share]:
    """Threads and cores of each node. Nodes on a GPU are not pinned, and may have any number of threads.

    Nor are nodes pinned where a quota grants the time of fewer cores: it names none, and every container of a machine
    would take the first ones.
    """
    num_nodes = config.prefill + config.decode
    cores = usable_cores()
    is_cuda = config.device.startswith("cuda") or (config.device == "auto" and Path("/dev/nvidia0").exists())
    shares = divide(cores, num_nodes, None if is_cuda else config.threads)
    if is_cuda or sum(map(len, cores)) < len(os.sched_getaffinity(0)):
        return [Share(config.threads or share.num_threads) for share in shares]
    return shares


def _local(host: str) -> str:
    """The address at which this machine reaches a listener bound to ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _url(config: ServeConfig) -> str:
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{in_url(_local(config.host))}:{config.port}"


# ---- readiness ------------------------------------------------------------------------------------------------------


async def wait_until_ready(config: ServeConfig, gateways: Sequence[GatewayPlace], output: Output) -> None:
    """Return once every node is registered at every gateway and a small request to each has succeeded.

    Raises NotReady: not within ``ready_timeout``.
    """
    began = time.monotonic()
    reminder = Reminder(began)
    while missing := await asyncio.to_thread(_missing_anywhere, config, gateways):
        now = time.monotonic()
        if now - began > config.ready_timeout:
            raise NotReady(f"not ready after --ready-timeout {config.ready_timeout:g} s; still missing: {missing}")
        if reminder.is_due(now):
            output.say(f"{now - began:.0f} s, waiting for {missing}")
        await asyncio.sleep(POLL_S)


def _missing_anywhere(config: ServeConfig, gateways: Sequence[GatewayPlace]) -> str:
    """What is not ready yet at the first gateway that is not; empty once all are. Blocks."""
    return next(filter(None, (_missing(config, place.group) for place in gateways)), "")


def _missing(config: ServeConfig, group: GatewayGroup | None) -> str:
    """What is not ready yet, in words; empty once all nodes are registered and a request has succeeded. Blocks."""
    try:
        ready, _ = _call(config, group, "GET", "/ready")
        status, content = _call(config, group, "GET", "/v1/workers")
        workers: Any = json.loads(content) if status == 200 else {}
    except (OSError, http.client.HTTPException, ValueError):
        return "the gateway"
    present = {worker["name"] for worker in workers.get("workers", []) if worker["model"] == config.served_name}
    lacking = [name for name in node_names(config) if name not in present]
    if lacking or ready != 200:
        num_others = len(lacking) - MAX_NAMED
        others = f" and {num_others} other node{'s' if num_others > 1 else ''}" if num_others > 0 else ""
        return ", ".join(lacking[:MAX_NAMED]) + others or "a pair of nodes that can work together"
    return _failed_request(config, group)


def _failed_request(config: ServeConfig, group: GatewayGroup | None) -> str:
    """Why a request for two tokens, one from each node, failed; empty if it succeeded."""
    body = {"model": config.served_name, "prompt": "To be", "max_tokens": 2, "ignore_eos": True, "temperature": 0}
    try:
        status, content = _call(config, group, "POST", "/v1/completions", json.dumps(body).encode())
    except (OSError, http.client.HTTPException) as error:
        return f"a first request ({error!r})"
    return "" if status == 200 else f"a first request ({content.decode(errors='replace')[:200]})"


def _call(
    config: ServeConfig, group: GatewayGroup | None, method: str, path: str, body: bytes = b""
) -> tuple[int, bytes]:
    """Status and body of the gateway's answer; of one of several, over the socket that it has for the others."""
    headers: dict[str, str | bytes] = {"Host": "localhost"}  # is always allowed; --host may not be (--allowed-hosts)
    if config.api_key:
        headers["Authorization"] = f"Bearer {config.api_key}".encode()
    if body:
        headers["Content-Type"] = "application/json"
    with contextlib.closing(_connection(config, group)) as connection:
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def _connection(config: ServeConfig, group: GatewayGroup | None) -> http.client.HTTPConnection:
    """A connection to the gateway."""
    host = _local(config.host)
    if group is not None:
        connection = http.client.HTTPConnection(host, config.port, timeout=CALL_TIMEOUT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(CALL_TIMEOUT_S)
        try:
            connection.sock.connect(group.address(group.index))
            if not is_same_user(connection.sock):  # it would learn the API key
                raise PermissionError("another user listens at the address of a gateway")
        except OSError:
            connection.close()
            raise
        return connection
    if config.tls_cert is None:
        return http.client.HTTPConnection(host, config.port, timeout=CALL_TIMEOUT_S)
    context = pinned_context(config.tls_cert)
    return http.client.HTTPSConnection(host, config.port, timeout=CALL_TIMEOUT_S, context=context)


def pinned_context(certificate: str) -> ssl.SSLContext:
    """A context for connections to a server that shows this very certificate, whatever name it has."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # Python 3.13 sets this flag, which refuses many private authorities. Their certificates may follow in the file.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


# ---- the command ----------------------------------------------------------------------------------------------------


async def serve(config: ServeConfig, output: Output, listener: socket.socket | None = None) -> int:
    """Run until a signal; return the exit status.

    Args:
        listener: which several gateways share.
    """
    shares = shares_of(config)
    gateways = gateway_places(config)
    supervisor = Supervisor(children(config, shares, gateways, listener), output, drain_timeout_s=config.drain_timeout)
    stopping = asyncio.Event()
    _on_signals(supervisor, stopping, output)
    threads = sorted({share.num_threads for share in shares})
    output.say(
        f"starting {config.workers} gateway{'s' if config.workers > 1 else ''}, {config.prefill} prefill and "
        f"{config.decode} decode for {config.served_name}, "
        f"{' or '.join(map(str, threads))} compute thread{'' if threads == [1] else 's'} each"
        f"{'' if shares[0].cpus else ', not pinned'}"
    )
    running = asyncio.create_task(supervisor.run())
    ready = asyncio.create_task(wait_until_ready(config, gateways, output))
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({running, ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and not ready.exception():
            supervisor.mark_ready()
            tell_ready(_url(config), _curl_headers(config), output)
            await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
        return _status(running, ready, output)
    finally:
        ready.cancel()
        if listener is not None:
            listener.close()  # the kernel refuses connections once the gateways have closed it too
        await supervisor.stop()
        running.cancel()
        await asyncio.gather(running, ready, return_exceptions=True)


def tell_ready(url: str, curl_headers: str, output: Output) -> None:
    """Print the line on standard output, and what to try next on standard error.

    The service continues if standard output is closed or its disk is full.
    """
    try:
        print(f"ready {url}", flush=True)
    except OSError as error:
        sys.stdout = None  # otherwise the interpreter fails again when it flushes at exit
        output.say(f"ready {url}; cannot write to standard output: {error.strerror}")
    body = '{"prompt": "To be, or", "max_tokens": 20}'
    output.say(f"try it: curl {url}/v1/completions -H 'Content-Type: application/json'{curl_headers} -d '{body}'")
    output.say(f"see it: {url}/ in a browser; {url}/docs describes the API")


def _curl_headers(config: ServeConfig) -> str:
    if not config.api_key:
        return ""
    is_exported = os.environ.get("BATON_API_KEY") == config.api_key
    return ' -H "Authorization: Bearer $BATON_API_KEY"' if is_exported else " -H 'Authorization: Bearer KEY'"


def _status(running: "asyncio.Task[None]", ready: "asyncio.Task[None]", output: Output) -> int:
    """The exit status: 0 after a requested stop, otherwise 1 and a message, or 2 if a child refuses its options."""
    for work in (running, ready):
        error = work.exception() if work.done() else None
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            if not isinstance(error, BatonError):
                raise error
            output.say(str(error))
            return REFUSED if isinstance(error, ChildFailed) and error.is_refusal else 1
    return 0


def _on_signals(supervisor: Supervisor, stopping: asyncio.Event, output: Output) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():  # second signal: kill everything at once
            supervisor.signal_all(signal.SIGKILL)
            os._exit(130)
        output.say("stopping")
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        loop.add_signal_handler(signal.SIGHUP, stop)


def main(argv: Sequence[str] | None = None) -> int:
    config = resolve(ServeConfig, argv, command="serve", help=HELP)
    output = ServeOutput(config.log_format, config.log_level)
    listener = None
    if os.getpid() == 1:  # until this process has its own handlers
        end_on_signals()
    try:
        find_checkpoint(config.model, config.revision)
        listener = bind(config.host, config.port, "--port") if config.workers > 1 else None
        config = with_ports(with_key(config), listener)
        if config.tls_cert is not None and config.tls_key is not None:
            make_tls_context(config.tls_cert, config.tls_key)  # a mistake ends serve before nodes load
        return asyncio.run(serve(config, output, listener))
    except ConfigError as error:
        output.say(str(error))
        return error.exit_status
    except Exception:  # which the interpreter would report too late: after the output is closed
        log.exception("serve failed")
        return 1
    finally:
        if listener is not None:
            listener.close()
        output.close()


if __name__ == "__main__":
    sys.exit(main())
