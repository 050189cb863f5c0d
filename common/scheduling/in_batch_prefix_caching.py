"""In-batch prefix caching: a prompt waits while another request computes its beginning. Pure.

A request is deferred if little of its prompt is cached and if it shares enough of it with a prompt that is being
computed. A system prompt, or the prompt of several samples, is then computed once even if the requests arrive together.
The two limits are SGLang's (``IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD`` and ``..._DEPRIORITIZE_THRESHOLD``), where only
the ``lpm`` policy does this.

Two prompts share at least n tokens exactly if their first n tokens are equal, so a dictionary look-up decides. Only a
few values of n occur: one for each number of cached pages up to the limit.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from common.cache.radix_cache import RadixCache
from common.cache.request_kv import adds_to_cache, packed_tokens
from common.cache.tree_node import TOKEN_BYTES, TokenKey
from common.errors import ConfigError
from common.request import Request


@dataclass(frozen=True, slots=True)
class InBatchPrefixLimits:
    """When a request is deferred.

    Attributes:
        max_cached: requests with more cached tokens are never deferred.
        min_shared: tokens beyond the cached ones that a request must share with a prompt that is being computed.
    """

    max_cached: int = 32
    min_shared: int = 32


def prefix_limits_from_environ(environ: Mapping[str, str]) -> InBatchPrefixLimits:
    """The defaults, overridden by ``BATON_*`` variables. Raises ConfigError for an invalid value."""
    default = InBatchPrefixLimits()
    return InBatchPrefixLimits(
        max_cached=_count_from_environ(environ, "BATON_IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD", default.max_cached, 0),
        min_shared=_count_from_environ(
            environ, "BATON_IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD", default.min_shared, 1
        ),
    )


def _count_from_environ(environ: Mapping[str, str], name: str, default: int, low: int) -> int:
    """An integer of at least ``low`` from the environment. Raises ConfigError naming the variable."""
    text = environ.get(name, str(default)).strip()
    if not text.isascii() or not text.isdigit() or int(text) < low:
        raise ConfigError(f"{name}={text} must be a whole number of at least {low}")
    return int(text)


class InBatchPrefixes:
    """The prefixes of prompts that are being computed, which other requests may wait for.

    Args:
        computing: the requests of these prompts.
        comes_first: whether a request comes before another one, which it then does not wait for.
    """

    def __init__(
        self,
        page_size: int,
        limits: InBatchPrefixLimits,
        computing: Iterable[Request] = (),
        *,
        comes_first: Callable[[Request, Request], bool | None] = lambda request, other: False,
    ) -> None:
        self._comes_first = comes_first
        self._page_size = page_size
        self._limits = limits
        # Required length of the shared prefix in bytes of packed tokens, by number of cached pages.
        self._needed = [
            -(-(num_cached + limits.min_shared) // page_size) * page_size * TOKEN_BYTES
            for num_cached in range(0, limits.max_cached + 1, page_size)
        ]
        self._holders: dict[tuple[str, TokenKey], Request] = {}
        for request in computing:
            self.add(request)

    def add(self, request: Request) -> None:
        if not request.is_wrapped:  # otherwise its prefix will not be cached
            self._add(packed_tokens(request, len(request.prompt)), request)

    def holder_of(self, request: Request, cache: RadixCache) -> Request | None:
        """The request whose prefix a waiting request should wait for, because it is being computed; None if none."""
        watch = request.watch
        holder = None if watch is None else self._holder(watch.key, request.salt, watch.num_tokens)
        if holder is None or self._comes_first(request, holder) or not adds_to_cache(cache, holder):
            return None
        return holder

    def defer_or_add(self, request: Request) -> bool:
        """Whether a waiting request should wait for one added before; if not and little of it is cached, add it."""
        watch = request.watch
        if watch is None or watch.num_tokens > self._limits.max_cached:
            return False
        if self._holder(watch.key, request.salt, watch.num_tokens) is not None:
            return True
        self._add(watch.key, request)
        return False

    def _add(self, key: TokenKey, request: Request) -> None:
        salt, holders = request.salt, self._holders
        for num_bytes in self._needed:
            if num_bytes > len(key):
                break
            holder = holders.setdefault((salt, key[:num_bytes]), request)
            if holder is not request and self._comes_first(request, holder):
                holders[salt, key[:num_bytes]] = request

    def _holder(self, key: TokenKey, salt: str, num_cached: int) -> Request | None:
        if num_cached > self._limits.max_cached:
            return None
        num_bytes = self._needed[num_cached // self._page_size]
        return self._holders.get((salt, key[:num_bytes])) if len(key) >= num_bytes else None
