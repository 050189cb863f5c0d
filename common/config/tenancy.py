"""Options of the gateway for tenants: the header that names them, and their limits."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from common.config.options import option
from common.errors import ConfigError

#: In --tenant-quotas: every tenant that is not named.
OTHER_TENANTS = "*"


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; None: no limit.

    Attributes:
        requests: outputs in flight, waiting ones included.
        tokens_per_minute: tokens of prompts and outputs together.
    """

    requests: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, kw_only=True)
class TenantOptions:
    tenant_header: bool = option(
        False,
        "Take the tenant from the header x-baton-tenant. For gateways behind a proxy that authenticates and sets it.",
    )
    tenant_quotas: tuple[str, ...] = option(
        (),
        "Limits of a tenant's requests in flight and tokens per minute, for example "
        "search:requests=8,tokens_per_minute=60000; * stands for every tenant that is not named. Requests above a "
        "limit get 429; tokens of one minute can be saved up. May be given more than once.",
        metavar="NAME:LIMITS",
    )


def check_tenancy(config: Any) -> None:
    parse_quotas(config.tenant_quotas)
    if config.api_key_file is None and not config.tenant_header:
        for flag, value in (("--tenant-quotas", config.tenant_quotas), ("--tenant-shares", config.tenant_shares)):
            if value:
                raise ConfigError(f"{flag} has no effect without tenants; add --api-key-file FILE or --tenant-header")


def parse_quotas(texts: Iterable[str]) -> dict[str, Quota]:
    """Parse quotas; return them by tenant.

    Args:
        texts: strings ``name:limit=number``; more limits of the same tenant may follow without the name.
    Raises:
        ConfigError: a string is not of this form, or a limit occurs twice.
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
