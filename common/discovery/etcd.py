"""The calls to etcd that discovery makes, through the JSON gateway that every member of a cluster serves."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from common.config.discovery import DiscoveryOptions
from common.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from etcd3gw import Etcd3Client, Lease

#: Seconds after which a member that has not answered is left for the next one.
TIMEOUT_S = 2.0

T = TypeVar("T")


class EtcdError(Exception):
    """No member of the cluster has answered, or one has refused a call."""


class EtcdStore:
    """Keys of an etcd cluster below ``--etcd-prefix``. Every call waits at most ``TIMEOUT_S`` for each member.

    Raises:
        ConfigError: the extra etcd is not installed.
    """

    def __init__(self, options: DiscoveryOptions) -> None:
        self._clients = [_client(url, options) for url in options.etcd_urls]
        self._prefix = options.etcd_prefix

    def values(self, folder: str) -> tuple[bytes, ...]:
        """Return the values of all keys in a folder, in the order of the keys. Raises EtcdError."""
        found = self._call(lambda client: client.get_prefix(f"{self._prefix}/{folder}/", sort_order="ascend"))
        return tuple(value for value, _ in found)

    def put(self, folder: str, name: str, value: str, *, ttl_s: int) -> int:
        """Set a key that vanishes after ``ttl_s`` unless it is renewed; return the number of its lease.

        Raises:
            EtcdError: the key may have been set for ``ttl_s``.
        """

        def put(client: "Etcd3Client") -> int:
            lease = client.lease(ttl_s)
            client.put(f"{self._prefix}/{folder}/{name}", value, lease)
            return int(lease.id)

        return self._call(put)

    def renew(self, lease: int) -> bool:
        """Renew the keys of a lease; return False if they have vanished. Raises EtcdError."""
        return self._call(lambda client: _lease(client, lease).refresh() > 0)

    def revoke(self, lease: int) -> None:
        """Delete the keys of a lease. Raises EtcdError."""
        self._call(lambda client: _lease(client, lease).revoke())

    def _call(self, function: "Callable[[Etcd3Client], T]") -> T:
        """Call a function with the member that answered last, then with each other one until one answers."""
        from etcd3gw.exceptions import Etcd3Exception

        problems: list[str] = []
        for _ in range(len(self._clients)):
            client = self._clients[0]
            try:
                return function(client)
            # The last four: what answers is not etcd.
            except (Etcd3Exception, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                problems.append(f"{client.base_url}: {_brief(error)}")
                self._clients = [*self._clients[1:], client]
        raise EtcdError("; ".join(problems))


def _client(url: str, options: DiscoveryOptions) -> "Etcd3Client":
    try:
        from etcd3gw import Etcd3Client
    except ImportError as error:
        raise ConfigError(f"--etcd {needs_extra('etcd')}") from error
    parts = urlsplit(url)
    client = Etcd3Client(
        host=parts.hostname or "",
        port=parts.port or 0,
        protocol=parts.scheme,
        ca_cert=options.etcd_ca,
        cert_cert=options.etcd_cert,
        cert_key=options.etcd_cert_key,
        timeout=TIMEOUT_S,
        api_path="/v3/",
    )
    if options.etcd_ca is not None:
        client.session.trust_env = False  # otherwise REQUESTS_CA_BUNDLE takes precedence
    return client


def _lease(client: "Etcd3Client", number: int) -> "Lease":
    from etcd3gw import Lease

    return Lease(number, client)


def _brief(error: Exception) -> str:
    """Return what etcd says, or the innermost cause, in a line: the library's own messages are empty, repeat whole
    objects, or have only the words of the HTTP status.
    """
    cause: BaseException = error
    while (inner := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)) is not None:
        cause = inner
    said = re.search(r'"message": *"([^"]+)"', getattr(cause, "detail_text", None) or "")
    text = said[1] if said else str(cause) or type(cause).__name__
    return text.splitlines()[0][:200]
