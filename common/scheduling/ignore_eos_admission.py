"""Admission of requests of known output length: the batch provably never runs out of pages. Pure.

With ``ignore_eos`` a request produces exactly ``max_new_tokens``, so the future is known. Sort the requests by the
tokens that they still produce. Just before the i-th of them ends, requests i and later have grown by that many tokens,
and requests before i have returned their pages. If the free pages suffice at each of these moments, they always do.

The rule is that of SGLang (``add_one_req_ignore_eos``), applied to whole pages. Pages that requests share count as
never returned. A request that is still computing its prompt counts as never ending, because its end is uncertain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.cache.kv_window import UNBOUNDED
from common.cache.tree_node import TreeNode
from common.request import Request


@dataclass(frozen=True, slots=True)
class Growth:
    """What one request holds and what it still needs.

    Attributes:
        num_tokens: prompt and output tokens now. The last output token never gets KV, which leaves one token of
            reserve.
        num_left: tokens that it still produces.
        num_private: pages that are returned when it ends.
        is_late: it may end later than its token count says.
        max_pages: the most pages that it takes; see ``KVWindow.max_pages``.
    """

    num_tokens: int
    num_pages: int
    num_left: int
    num_private: int
    is_late: bool = False
    max_pages: int = UNBOUNDED

    @classmethod
    def of(cls, request: Request, num_left: int, *, is_late: bool, max_pages: int = UNBOUNDED) -> "Growth":
        num_private = len(request.own) + num_private_pages(request.node)
        return cls(request.num_tokens, len(request.pages), num_left, num_private, is_late, max_pages)


def is_extending(request: Request) -> bool:
    """Whether the request still computes its prompt: more than its last token lacks KV."""
    return request.num_tokens - request.num_computed > 1


def num_private_pages(node: TreeNode | None) -> int:
    """Cached pages on the path of a locked node that only this lock keeps."""
    return 0 if node is None else sum(len(part.pages) for part in node.path() if part.locks == 1)


def fits(growths: Sequence[Growth], num_available: int, page_size: int) -> bool:
    """Whether ``num_available`` pages suffice at every moment until all requests have ended."""
    order = sorted(growths, key=lambda growth: growth.num_left)
    tokens = np.array([growth.num_tokens for growth in order], np.int64)
    held = np.array([growth.num_pages for growth in order], np.int64)
    left = np.array([growth.num_left for growth in order], np.int64)
    most = np.array([growth.max_pages for growth in order], np.int64)
    is_late = np.array([growth.is_late for growth in order])
    private = np.array([growth.num_private for growth in order], np.int64)
    # One row per moment, one column per request: the further pages that it has taken, as if it returned none. It is one
    # array, because allocating more of this size takes longer than the arithmetic.
    taken = np.minimum.outer(left, left)
    taken += tokens - held * page_size + page_size - 1
    taken //= page_size
    np.clip(taken, 0, np.maximum(most - held, 0), out=taken)
    returned = np.where(is_late, 0, taken.diagonal() + private)
    returned_before = np.cumsum(returned) - returned
    return bool((taken.sum(axis=1) <= num_available + returned_before).all())
