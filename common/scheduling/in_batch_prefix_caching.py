"""In-batch prefix caching: a prompt whose beginning is being computed for another waits until that is cached. Pure.

Looked at are prompts of which little is cached; held back are those that share enough with one being computed. So a
system prompt, or the prompt of several samples, is computed once although its users arrive together. The two limits are
SGLang's (IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD and ..._DEPRIORITIZE_THRESHOLD); there only ``lpm`` does this.

Two prompts share at least n tokens exactly if their first n are equal, so a look-up by those tells, and n takes few
values: what may be cached at most, in whole pages, and what must be shared beyond it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.cache.radix_cache import TOKEN_BYTES, RadixCache, TokenKey
from common.cache.request_kv import packed_tokens
from common.request import Request
from common.scheduling.new_token_ratio import count_from


@dataclass(frozen=True, slots=True)
class SharingLimits:
    """Attributes:
    max_cached: prompts with more cached tokens are not held back.
    min_shared: tokens, beyond those cached, that a prompt must share with one being computed to be held back.
    """

    max_cached: int = 32
    min_shared: int = 32


def sharing_limits_from(environ: Mapping[str, str]) -> SharingLimits:
    """The defaults, overridden by ``BATON_*`` variables. Raises ConfigError for a value that cannot be."""
    default = SharingLimits()
    return SharingLimits(
        max_cached=count_from(environ, "BATON_IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD", default.max_cached, 0),
        min_shared=count_from(environ, "BATON_IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD", default.min_shared, 1),
    )


class Sharing:
    """The prompts being computed in the step in the making."""

    def __init__(self, page_size: int, limits: SharingLimits, computing: Iterable[Request] = ()) -> None:
        self._page_size = page_size
        self._limits = limits
        #: How long a common beginning must be, by cached pages; in bytes of packed tokens.
        self._needed = [
            -(-(num_cached + limits.min_shared) // page_size) * page_size * TOKEN_BYTES
            for num_cached in range(0, limits.max_cached + 1, page_size)
        ]
        self._holders: dict[tuple[str, TokenKey], Request] = {}
        for request in computing:
            self.add(request)

    def add(self, request: Request) -> None:
        """This prompt is being computed too."""
        self._add(packed_tokens(request, len(request.prompt)), request)

    def waits_for(self, request: Request, cache: RadixCache) -> Request | None:
        """The one whose computing saves this request a good part of its prompt, if it waits a little."""
        if not self._holders or not cache.is_enabled:
            return None
        watch = request.watch
        if watch is not None:
            return self._holder(watch.key, request.salt, watch.num_tokens)
        key = packed_tokens(request, request.num_cacheable)
        return self._holder(key, request.salt, cache.match(key, request.salt).num_tokens)

    def holds_back_or_add(self, request: Request) -> bool:
        """Whether a waiting request would wait for one looked at before; if not, others may wait for it."""
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
            holders.setdefault((salt, key[:num_bytes]), request)

    def _holder(self, key: TokenKey, salt: str, num_cached: int) -> Request | None:
        if num_cached > self._limits.max_cached:
            return None
        num_bytes = self._needed[num_cached // self._page_size]
        return self._holders.get((salt, key[:num_bytes])) if len(key) >= num_bytes else None
