"""The options of the gateway about tenants: on whose account a request is served, and how much of that there may be."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from common.config.options import option
from common.errors import ConfigError

#: In --tenant-quotas: each of those that are not named.
EVERYBODY_ELSE = "*"


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may have; None for no bound.

    Attributes:
        requests: outputs in flight, those that wait included.
        tokens_per_minute: of prompts and outputs together.
    """

    requests: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, kw_only=True)
class TenantOptions:
    """Part of the gateway's configuration."""

    tenant_keys: str | None = option(
        None,
        "File with the keys of tenants, which clients send as bearer tokens: on each line a tenant's name and a key, "
        "or sha256: and the key's hash in hexadecimal. Several keys of one tenant stand on several lines.",
        metavar="FILE",
    )
    tenant_header: bool = option(
        False,
        "Take the tenant from the header x-baton-tenant. For gateways behind something that authenticates and sets it.",
    )
    tenant_quotas: tuple[str, ...] = option(
        (),
        "What a tenant may have in flight and per minute, as in search:requests=8,tokens_per_minute=60000; * stands "
        "for each tenant that is not named. More gets 429. May be given more than once.",
        metavar="NAME:LIMITS",
    )


def check_tenancy(config: Any) -> None:
    """Raises ConfigError: names the flag."""
    parse_quotas(config.tenant_quotas)
    if config.tenant_keys is None and not config.tenant_header:
        for flag, value in (("--tenant-quotas", config.tenant_quotas), ("--tenant-shares", config.tenant_shares)):
            if value:
                raise ConfigError(f"{flag} has no effect as long as nobody is a tenant: add --tenant-keys FILE")


def parse_quotas(texts: Iterable[str]) -> dict[str, Quota]:
    """Quotas by tenant.

    Args:
        texts: ``name:limit=number``; further limits of the same tenant may follow without the name.

    Raises:
        ConfigError: names the flag.
    """
    limits: dict[str, dict[str, int]] = {}
    name = ""
    for text in texts:
        head, colon, rest = text.rpartition(":")
        name, text_left = (head, rest) if colon else (name, text)
        limit, _, number = text_left.partition("=")
        is_number = number.isascii() and number.isdigit() and int(number) > 0
        if not name or limit not in ("requests", "tokens_per_minute") or not is_number:
            example = "NAME:requests=8,tokens_per_minute=60000"
            raise ConfigError(f"--tenant-quotas must be like {example} with numbers above 0, not {text!r}")
        if limit in limits.setdefault(name, {}):
            raise ConfigError(f"--tenant-quotas gives {limit} of {name} twice")
        limits[name][limit] = int(number)
    return {name: Quota(**given) for name, given in limits.items()}
