"""Asks the server before the run for its model and the size of its vocabulary."""

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from common.errors import ConfigError, reason_of

TIMEOUT_S = 10.0
MAX_BODY = 16 << 20  # bytes
#: Range of token ids for a vocabulary of unknown size; nearly every model has these.
USUAL_VOCAB = (100, 10_000)
SHARE_OF_SPECIALS = 64
MIN_VOCAB, MAX_VOCAB = 16, 1 << 30
UNKNOWN_VOCAB = (
    f"the server does not report the size of its vocabulary: prompts use ids from {USUAL_VOCAB[0]} to "
    f"{USUAL_VOCAB[1]:,} (set --vocab-size, or use --prompt text)"
)
Headers = Mapping[str, str]
FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")


@dataclass(frozen=True)
class ServerInfo:
    """The facts that a server reports about itself.

    Attributes:
        kind: owner of the model as listed: baton, llamacpp, vllm, sglang.
        details: version and limits, for the report.
    """

    model: str | None
    vocab_size: int | None
    kind: str
    details: dict[str, Any]

    def sends_ids(self, endpoint: str, is_stream: bool) -> bool:
        """Whether it can return the token ids of its output; SGLang refuses that for streamed chats."""
        return not (self.kind == "sglang" and endpoint == "chat" and is_stream)

    @property
    def vocab(self) -> tuple[int, int]:
        """Range of ids that are safe to send; special tokens are at both ends of a vocabulary."""
        if self.vocab_size is None:
            return USUAL_VOCAB
        low = min(100, self.vocab_size // 8)
        return low, max(low + 1, self.vocab_size - max(SHARE_OF_SPECIALS, self.vocab_size // 100))


def fetch_server_info(url: str, headers: Headers, *, verify_tls: bool = True) -> ServerInfo:
    """Ask the server.

    Raises ConfigError: nothing answers, or the key is missing or wrong.
    """
    parts = urlsplit(url)
    models = get_json(parts, "/v1/models", headers, verify_tls, is_refusable=True)
    entries = models.get("data") if isinstance(models, dict) else None
    first = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}
    meta = first.get("meta") if isinstance(first.get("meta"), dict) else {}
    server = get_json(parts, "/server_info", headers, verify_tls)
    server = server if isinstance(server, dict) else {}
    limits = server.get("limits") if isinstance(server.get("limits"), dict) else {}
    said = ((limits or {}).get("vocab_size"), (meta or {}).get("n_vocab"), _vocab_of(first.get("root")))
    vocab = next((size for size in said if isinstance(size, int) and MIN_VOCAB <= size <= MAX_VOCAB), None)
    details = {name: server[name] for name in ("version", "limits") if name in server}
    model = first.get("id")
    return ServerInfo(model if isinstance(model, str) else None, vocab, str(first.get("owned_by", "")), details)


def _vocab_of(folder: Any) -> int | None:
    """Read it from the model's folder, which vLLM and SGLang name; None if that is not on this machine."""
    try:
        model = json.loads(Path(str(folder), "config.json").read_bytes())
        size = model.get("vocab_size") or model.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) and size > 0 else None


def get_json(parts: SplitResult, path: str, headers: Headers, verify_tls: bool, *, is_refusable: bool = False) -> Any:
    """Decode the response to a GET as JSON; an empty dict if it is an error or no JSON.

    Raises ConfigError: with ``is_refusable``, if the key is missing or wrong.
    """
    status, body = get(parts, path, headers, verify_tls)
    if status in (401, 403) and is_refusable:
        if "Authorization" in headers:
            raise ConfigError(f"--url {parts.geturl()} refuses this --api-key (HTTP {status})")
        raise ConfigError(f"--url {parts.geturl()} requires an API key: set BATON_LOADTEST_API_KEY (HTTP {status})")
    try:
        return json.loads(body) if status == 200 else {}
    except (ValueError, RecursionError):  # no JSON, no text, or nested too deeply
        return {}


def flush_cache(url: str, headers: Headers, *, verify_tls: bool = True) -> None:
    """Empty the server's prefix cache. Raises ConfigError: the server has no such endpoint."""
    statuses = []
    for path in FLUSH_PATHS:
        statuses.append(get(urlsplit(url), path, headers, verify_tls, method="POST")[0])
        if statuses[-1] == 200:
            return
    raise ConfigError(
        f"--flush-cache: the server cannot empty its cache (HTTP {', '.join(map(str, statuses))}): leave it out"
    )


def get(parts: SplitResult, path: str, headers: Headers, verify_tls: bool, *, method: str = "GET") -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST without a body.

    Raises ConfigError: nothing answers, or the response does not end.
    """
    connection = connect(parts, verify_tls)
    try:
        connection.request(method, parts.path.rstrip("/").removesuffix("/v1") + path, headers=dict(headers))
        response = connection.getresponse()
        return response.status, _bounded(response, parts)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"--url {parts.geturl()}: its certificate is not trusted ({error.verify_message}): use --no-verify-tls, or "
            "set SSL_CERT_FILE=FILE to its issuer's certificate"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = reason_of(error) or type(error).__name__
        raise ConfigError(f"--url {parts.geturl()}: nothing answers there ({reason})") from None
    finally:
        connection.close()


def _bounded(response: http.client.HTTPResponse, parts: SplitResult) -> bytes:
    """The body, limited in size and time; the socket's timeout limits each read alone."""
    body, deadline_at = b"", time.monotonic() + TIMEOUT_S
    while part := response.read1(1 << 16):
        body += part
        if len(body) > MAX_BODY or time.monotonic() > deadline_at:
            raise ConfigError(f"--url {parts.geturl()}: its response does not end")
    return body


def connect(parts: SplitResult, verify_tls: bool) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, parts.port or 80, timeout=TIMEOUT_S)
    context = ssl.create_default_context()
    if not verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, parts.port or 443, timeout=TIMEOUT_S, context=context)
