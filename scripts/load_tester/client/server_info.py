"""What the server says about itself before the run: the model's name and the size of its vocabulary."""

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from common.errors import ConfigError

TIMEOUT_S = 10.0
MAX_BODY = 16 << 20  # bytes
#: Ids drawn where nobody says how large the vocabulary is: inside that of nearly every model.
USUAL_VOCAB = (100, 10_000)
SHARE_OF_SPECIALS = 64
MIN_VOCAB, MAX_VOCAB = 16, 1 << 30
UNKNOWN_VOCAB = (
    f"the server does not say how many token ids it has: prompts are of ids from {USUAL_VOCAB[0]} to "
    f"{USUAL_VOCAB[1]:,} (--vocab-size, or --prompt text)"
)
Headers = Mapping[str, str]
FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")


@dataclass(frozen=True)
class Server:
    """A server as it was found.

    Attributes:
        model: None if it lists none.
        vocab_size: None if it does not say.
        kind: Baton, llama.cpp, vllm, ... as far as it can be told.
        details: what it says about itself, for the report.
    """

    model: str | None
    vocab_size: int | None
    kind: str
    details: dict[str, Any]

    def sends_ids(self, endpoint: str, is_stream: bool) -> bool:
        """Whether it can be asked for the token ids of its output: SGLang refuses that for streams of chats."""
        return not (self.kind == "sglang" and endpoint == "chat" and is_stream)

    @property
    def vocab(self) -> tuple[int, int]:
        """Range of ids that are safe to send: special tokens live at either end."""
        if self.vocab_size is None:
            return USUAL_VOCAB
        low = min(100, self.vocab_size // 8)
        return low, max(low + 1, self.vocab_size - max(SHARE_OF_SPECIALS, self.vocab_size // 100))


def probe(url: str, headers: Headers, *, verify_tls: bool = True) -> Server:
    """Ask the server.

    Args:
        headers: sent along, the key among them.

    Raises:
        ConfigError: nothing answers, or it wants a key.
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
    details = {name: server[name] for name in ("version", "model", "limits") if name in server}
    model = first.get("id")
    return Server(model if isinstance(model, str) else None, vocab, str(first.get("owned_by", "")), details)


def _vocab_of(folder: Any) -> int | None:
    """From the model's own folder, which vLLM and SGLang name; known only if the server is on this machine."""
    try:
        model = json.loads(Path(str(folder), "config.json").read_bytes())
        size = model.get("vocab_size") or model.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) and size > 0 else None


def get_json(parts: SplitResult, path: str, headers: Headers, verify_tls: bool, *, is_refusable: bool = False) -> Any:
    """The answer to a GET as JSON; an empty dict if it is none, or an error.

    Raises:
        ConfigError: ``is_refusable``, and the server wants a key, or another.
    """
    status, body = get(parts, path, headers, verify_tls)
    if status in (401, 403) and is_refusable:
        if "Authorization" in headers:
            raise ConfigError(f"--url {parts.geturl()} refuses this --api-key (HTTP {status})")
        raise ConfigError(f"--url {parts.geturl()} wants an API key: set BATON_LOADTEST_API_KEY (HTTP {status})")
    try:
        return json.loads(body) if status == 200 else {}
    except (ValueError, RecursionError):  # no JSON, not even text, or brackets without end
        return {}


def flush_cache(url: str, headers: Headers, *, verify_tls: bool = True) -> None:
    """Empty the server's prefix cache.

    Raises:
        ConfigError: it does not do that.
    """
    statuses = []
    for path in FLUSH_PATHS:
        statuses.append(get(urlsplit(url), path, headers, verify_tls, method="POST")[0])
        if statuses[-1] == 200:
            return
    raise ConfigError(f"--flush-cache: the server does not do that (HTTP {', '.join(map(str, statuses))})")


def get(parts: SplitResult, path: str, headers: Headers, verify_tls: bool, *, method: str = "GET") -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST without a body.

    Raises:
        ConfigError: nothing answers, or without end.
    """
    connection = connect(parts, verify_tls)
    try:
        connection.request(method, parts.path.rstrip("/").removesuffix("/v1") + path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, _bounded(answer, parts)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"--url {parts.geturl()}: its certificate is not to be trusted ({error.verify_message}): --no-verify-tls, "
            "or name who signed it in the environment, SSL_CERT_FILE=FILE"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"--url {parts.geturl()}: nothing answers there ({error or type(error).__name__})") from None
    finally:
        connection.close()


def _bounded(answer: http.client.HTTPResponse, parts: SplitResult) -> bytes:
    """The body, of a size and in a time that such an answer may take; the socket's own limit bounds each read."""
    body, deadline_at = b"", time.monotonic() + TIMEOUT_S
    while part := answer.read1(1 << 16):
        body += part
        if len(body) > MAX_BODY or time.monotonic() > deadline_at:
            raise ConfigError(f"--url {parts.geturl()}: what answers there does not come to an end")
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
