"""Options of the HTTP server's access: keys, TLS, and the hosts and origins that it answers."""

import re
from dataclasses import dataclass
from typing import Any

from common.config.options import option
from common.errors import ConfigError
from common.wire.address import check_host, check_reach

#: An origin as browsers send it.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#,]+|null|\*")
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9._-]+|\*")


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    api_key: str | None = option(
        None,
        "Key that clients must send as a bearer token. Set it in the environment to keep it out of the process list.",
        is_secret=True,
    )
    admin_api_key: str | None = option(
        None,
        "Key for requests that affect others, such as /flush_cache and aborting all requests. Without it and without "
        "--api-key-file, every caller without a tenant may do that. Set it in the environment.",
        is_secret=True,
    )
    api_key_file: str | None = option(
        None,
        "TOML file with hashes of API keys, their tenants and limits; `baton apikey` creates its entries. It is read "
        "again whenever it changes.",
        metavar="FILE",
    )
    tls_cert: str | None = option(
        None,
        "PEM file with the certificate chain of the HTTP server. With --tls-key, the server speaks HTTPS (TLS 1.2 or "
        "later) and nothing else.",
        metavar="FILE",
    )
    tls_key: str | None = option(None, "PEM file with the private key of --tls-cert.", metavar="FILE")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host name under which clients reach the HTTP server, such as llm.example.com or *.example.com; * allows all. "
        "Addresses and localhost are always allowed. Without it: all names, or no others if --host is loopback. May "
        "be given more than once.",
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origin whose web pages may call the API from a browser, such as https://example.com; * allows all. May be "
        "given more than once.",
        metavar="ORIGIN",
    )


def check_access(config: Any) -> None:
    check_host("--host", config.host)
    if not config.api_key and config.api_key_file is None:
        check_reach("--host", config.host, config.insecure, "set --api-key, or ")
    for flag, key in (("--api-key", config.api_key), ("--admin-api-key", config.admin_api_key)):
        if key is not None and (not key.isprintable() or key != key.strip()):
            raise ConfigError(
                f"{flag} has a line break, or a space at its beginning or end, which no client can send: remove it"
            )
    if config.api_key and config.api_key == config.admin_api_key:
        raise ConfigError("--api-key and --admin-api-key are the same; give different keys")
    if (config.tls_cert is None) != (config.tls_key is None):
        given, lacking = ("--tls-cert", "--tls-key") if config.tls_cert else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} needs {lacking} too: give both, or none for plain HTTP")
    for name in config.allowed_hosts:
        if not _HOST_NAME.fullmatch(name):
            raise ConfigError(
                f"--allowed-hosts must be a name such as llm.example.com or *.example.com, without a port, not {name!r}"
            )
    for origin in config.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                "--allowed-origins must be as browsers send it, such as https://example.com or http://localhost:3000, "
                f"in lower case and without a path, not {origin!r}"
            )
