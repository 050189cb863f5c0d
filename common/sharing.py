"""In-batch prefix caching: a prompt whose beginning is being computed for another waits until that is cached. Pure.

Looked at are prompts of which little is cached; held back are those that share enough with one being computed. So a
system prompt, or the prompt of several samples, is computed once although its users arrive together. The two limits are
SGLang's (IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD and ..._DEPRIORITIZE_THRESHOLD); there only ``lpm`` does this.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from common.radix import TOKEN_BYTES, RadixCache, TokenKey
from common.request import Request
from common.request_pages import packed_tokens


@dataclass(frozen=True, slots=True)
class SharingLimits:
    """Attributes:
    max_cached: prompts with more cached tokens are not held back.
    min_shared: tokens, beyond those cached, that a prompt must share with one being computed to be held back.
    """

    max_cached: int = 32
    min_shared: int = 32


class Sharing:
    """The prompts being computed in the step in the making."""

    def __init__(self, page_size: int, limits: SharingLimits, computing: Iterable[Request]) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._limits = limits
        self._by_first_page: dict[tuple[str, bytes], list[tuple[TokenKey, Request]]] = {}
        for request in computing:
            self.add(request)

    def add(self, request: Request) -> None:
        """This prompt is being computed too."""
        key = packed_tokens(request, len(request.prompt))
        self._by_first_page.setdefault((request.salt, key[: self._page_bytes]), []).append((key, request))

    def waits_for(self, request: Request, cache: RadixCache) -> Request | None:
        """The one whose computing saves this request a good part of its prompt, if it waits a little."""
        key = packed_tokens(request, request.num_cacheable)
        others = self._by_first_page.get((request.salt, key[: self._page_bytes]), ())
        if not others or not cache.is_enabled:
            return None
        num_cached = cache.match(key, request.salt).num_tokens
        if num_cached > self._limits.max_cached:
            return None
        min_shared = num_cached + self._limits.min_shared
        return next((other for other_key, other in others if self._num_shared(key, other_key) >= min_shared), None)

    def _num_shared(self, key: TokenKey, other: TokenKey) -> int:
        """Tokens that both begin with, in whole pages."""
        num_bytes = min(len(key), len(other))
        if key[:num_bytes] != other[:num_bytes]:
            differs = np.frombuffer(key, np.uint8, num_bytes) != np.frombuffer(other, np.uint8, num_bytes)
            num_bytes = int(differs.argmax())
        return num_bytes // self._page_bytes * self._page_bytes // TOKEN_BYTES
