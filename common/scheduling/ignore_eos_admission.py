"""Proves that a batch of known output lengths never runs out of pages.

Under ignore-EOS a request produces exactly ``max_new_tokens``. So the future is known: sort the requests by the tokens
they still have to produce; just before the i-th of them ends, those from i on have each grown by as many tokens, and
those before i have given their pages back. If the free pages cover that at each such moment, they always do. The walk
is SGLang's (``add_one_req_ignore_eos``), done here in whole pages, with pages that requests share counted as not coming
back, and with requests that still extend their prompt (whose end is therefore uncertain) counted as never ending.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.cache.radix_cache import TreeNode
from common.request import Request


@dataclass(frozen=True, slots=True)
class Growth:
    """What one request holds and is going to need.

    Attributes:
        num_tokens: now. The last token of an output never gets KV; its place is the one token reserved per request.
        num_pages: in its page table.
        num_left: tokens it will still produce.
        num_private: pages that come back when it ends.
        is_late: it may end later than by counting steps.
    """

    num_tokens: int
    num_pages: int
    num_left: int
    num_private: int
    is_late: bool = False

    @classmethod
    def of(cls, request: Request, num_left: int, *, is_late: bool) -> "Growth":
        """Of an admitted request."""
        num_private = len(request.own) + num_private_pages(request.node)
        return cls(request.num_tokens, len(request.pages), num_left, num_private, is_late)


def is_extending(request: Request) -> bool:
    """Whether more than its last token still lacks KV."""
    return request.num_tokens - request.num_computed > 1


def num_private_pages(node: TreeNode | None) -> int:
    """Cached pages that only one lock keeps, on the path of a locked node."""
    return 0 if node is None else sum(len(part.pages) for part in node.path() if part.locks == 1)


def fits(growths: Sequence[Growth], num_available: int, page_size: int) -> bool:
    """Whether ``num_available`` free pages suffice at every moment until all have ended."""
    order = sorted(growths, key=lambda growth: growth.num_left)
    tokens = np.array([growth.num_tokens for growth in order], np.int64)
    held = np.array([growth.num_pages for growth in order], np.int64)
    left = np.array([growth.num_left for growth in order], np.int64)
    is_late = np.array([growth.is_late for growth in order])
    comes_back = np.where(is_late, 0, [growth.num_private for growth in order])
    # One row per moment, one column per request.
    grown = np.minimum(left[:, None], left[None, :])
    pages = np.maximum(-(-(tokens + grown) // page_size) - held, 0)
    is_there = np.tri(len(order), dtype=bool).T | is_late
    need = np.where(is_there, pages, 0).sum(axis=1)
    back = np.cumsum(comes_back) - comes_back
    return bool((need <= num_available + back).all())
