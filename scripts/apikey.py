"""``apikey``: a new key for clients of the HTTP server, and its entry in the file of ``--api-key-file``."""

import argparse
import secrets
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from gateway.http.access.api_keys import HASHED, digest_of
from gateway.http.access.auth import TENANT

#: A hundred years.
MAX_DAYS = 36_500

HELP = """Make an API key. The key goes to standard error, once: it is stored nowhere.
Its entry for --api-key-file, which has only the key's hash, goes to standard
output.

  baton apikey search >> keys.toml   a key of the tenant search
  baton apikey --admin >> keys.toml  a key for what changes the state of others
  baton gateway --api-key-file keys.toml ...

The gateway reads the file again whenever it changes: add an entry to permit a
key, remove it to revoke the key. The file is for its user alone: chmod 600."""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.tenant is not None and not TENANT.fullmatch(options.tenant):
        print("apikey: a tenant's name has 1 to 128 of the characters A-Z a-z 0-9 . _ @ / + -", file=sys.stderr)
        return 2
    if not options.tenant and (options.requests or options.tokens_per_minute):
        print("apikey: --requests and --tokens-per-minute are limits of a tenant; give TENANT", file=sys.stderr)
        return 2
    key = f"sk-baton-{secrets.token_hex(32)}"
    try:
        print(f"\n{entry(key, options, datetime.now(UTC))}", flush=True)
    except OSError as error:
        sys.stdout = None  # otherwise the interpreter fails again when it flushes at exit
        print(f"apikey: cannot write the entry to standard output: {error.strerror}", file=sys.stderr)
        return 1
    print(f"the key, which is shown only now: {key}", file=sys.stderr)
    return 0


def entry(key: str, options: argparse.Namespace, now: datetime) -> str:
    lines = ["[[key]]", f'hash = "{HASHED}{digest_of(key).hex()}"']
    if options.tenant:
        lines.append(f'tenant = "{options.tenant}"')
    if options.requests:
        lines.append(f"requests = {options.requests}")
    if options.tokens_per_minute:
        lines.append(f"tokens_per_minute = {options.tokens_per_minute}")
    if options.days:
        lines.append(f"expires = {now + timedelta(days=options.days):%Y-%m-%dT%H:%M:%SZ}")
    if options.admin:
        lines.append("admin = true")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton apikey", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tenant", nargs="?", metavar="TENANT", help="whose requests these are")
    parser.add_argument("--requests", type=_count, metavar="N", help="requests that the tenant may have in flight")
    parser.add_argument(
        "--tokens-per-minute", type=_count, metavar="N", help="the tenant's tokens, of prompts and outputs"
    )
    parser.add_argument("--days", type=_days, metavar="N", help="days for which the key is valid; by default for ever")
    parser.add_argument("--admin", action="store_true", help="allow what changes the state of others")
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= 1 << 31:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def _days(text: str) -> int:
    if (days := _count(text)) > MAX_DAYS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_DAYS}, not {days}; without it, the key has no end")
    return days
