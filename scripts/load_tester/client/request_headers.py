"""HTTP headers of requests: the common head of a run, and the headers that name a request's tenant."""

from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import ConfigError, reason_of
from scripts.load_tester.client.client_pool import resolve_host
from scripts.load_tester.client.ipc import Setup
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.workload.planned_request import PlannedRequest
from scripts.load_tester.workload.prompts import PATHS


class RequestHeaders:
    """Headers that differ between requests: a tenant's name or key.

    Raises ConfigError: ``--tenant-keys`` cannot be read.
    """

    def __init__(self, config: LoadtestConfig) -> None:
        self._header = config.tenant_header
        self._keys = read_tenant_keys(config.tenant_keys) if config.tenant_keys else {}
        self._key = config.api_key if config.tenant_keys else None  # otherwise it is in the common head

    def check(self, tenants: Collection[str]) -> None:
        """Raise ConfigError if a name cannot be part of a header, or if no tenant of the load has a key."""
        if self._keys and self._keys.keys().isdisjoint(tenants):
            own = ", ".join(sorted(filter(None, tenants))[:3]) or "none"
            raise ConfigError(
                f"--tenant-keys names no tenant of this load, which has {own}: correct the names in the file, or give "
                "tenants with --tenants, --mix or the trace"
            )
        for tenant in tenants if self._header else ():
            if not (tenant.isascii() and tenant.isprintable()):
                raise ConfigError(f"--tenant-header: a tenant's name must be printable ASCII, not {tenant[:64]!r}")

    def of(self, planned: PlannedRequest) -> bytes:
        """A request's own header lines; its tenant has been checked."""
        lines = []
        key = self._keys.get(planned.tenant, self._key)
        if key:
            lines.append(f"Authorization: Bearer {key}\r\n")
        if self._header and planned.tenant:
            lines.append(f"{self._header}: {planned.tenant}\r\n")
        return "".join(lines).encode()


def read_tenant_keys(path: str) -> dict[str, str]:
    """Read API keys by tenant: on each line a name and a key. Raises ConfigError: names the line, never the key."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tenant-keys {path} cannot be read: {reason_of(error)}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[1].startswith("sha256:"):
            raise ConfigError(f"--tenant-keys {path}, line {number}: must be a tenant's name and its key (not a hash)")
        keys[words[0]] = words[1]
    return keys


def common_headers(config: LoadtestConfig) -> dict[str, str]:
    """Headers of every HTTP request to the server: the key and ``--header``."""
    found = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    if config.header:
        name, _, value = config.header.partition(":")
        found[name.strip()] = value.strip()
    return found


def client_setup(config: LoadtestConfig) -> Setup:
    """Make the configuration of the client processes. Raises ConfigError: the host has no address."""
    parts = urlsplit(config.url)
    is_tls = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if is_tls else 80)
    try:
        address = resolve_host(host, port)
    except OSError as error:
        raise ConfigError(f"--url {config.url}: {reason_of(error)}") from None
    path = parts.path.rstrip("/").removesuffix("/v1") + PATHS[config.endpoint]
    fields = {
        "Host": parts.netloc.rpartition("@")[2],
        "Content-Type": "application/json",
        "Accept": "text/event-stream" if config.stream else "application/json",
    }
    own = common_headers(config)
    if config.tenant_keys:
        own.pop("Authorization", None)  # each request has its own key
    given = {name.lower() for name in own}
    fields = {name: value for name, value in fields.items() if name.lower() not in given} | own
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    head = "\r\n".join([*lines, "Content-Length: "]).encode()
    return Setup(
        address,
        port,
        host if is_tls else "",
        config.verify_tls,
        head,
        config.concurrency or 0,
        config.timeout_s,
        (config.duration_s or 0.0) if config.concurrency else 0.0,
    )
