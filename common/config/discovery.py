"""Options of discovery through etcd, for gateways and nodes."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from common.config.options import check_unset, option
from common.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DiscoveryOptions:
    etcd: str | None = option(
        None,
        "URLs of the members of an etcd cluster, separated by commas (needs the extra etcd). Gateways announce "
        "themselves there, and nodes register with all that they find.",
        metavar="URL[,...]",
    )
    etcd_prefix: str = option(
        "/baton", "Where keys begin in etcd. Gateways and nodes with the same prefix belong together.", metavar="KEY"
    )
    etcd_ca: str | None = option(
        None, "Certificate authority of etcd's certificate, for https. Without it: those of the system.", metavar="FILE"
    )
    etcd_cert: str | None = option(None, "Certificate that identifies this process to etcd.", metavar="FILE")
    etcd_cert_key: str | None = option(None, "Key of --etcd-cert.", metavar="FILE")

    @property
    def etcd_urls(self) -> tuple[str, ...]:
        return () if self.etcd is None else tuple(self.etcd.split(","))


def check_discovery(config: DiscoveryOptions) -> None:
    """Raises ConfigError: the options of etcd do not fit together."""
    if config.etcd is None:
        check_unset(config, ("etcd_prefix", "etcd_ca", "etcd_cert", "etcd_cert_key"), "needs --etcd")
        return
    for url in config.etcd_urls:
        if "@" in url:
            raise ConfigError("--etcd takes no user names and passwords; use --etcd-cert and --etcd-cert-key")
        if not _is_server(url):
            raise ConfigError(f"--etcd must be URLs such as http://10.0.0.5:2379, not {url!r}")
    if (config.etcd_cert is None) != (config.etcd_cert_key is None):
        raise ConfigError("--etcd-cert and --etcd-cert-key go together; give both or neither")
    if not config.etcd_prefix.startswith("/") or config.etcd_prefix.endswith("/"):
        raise ConfigError(f"--etcd-prefix must begin with a slash and not end with one, unlike {config.etcd_prefix!r}")


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname and parts.port) and parts.path in ("", "/")
    except ValueError:  # of the port
        return False
