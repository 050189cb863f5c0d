"""Room that a decode node keeps for the outputs of its requests. Pure.

It is a constant number of tokens for each request, or what the request may still produce if that is less. Requests end
one after another and return their pages, so that room for whole outputs would leave memory idle (docs/scheduling.md has
the figures). Where the room does not suffice, requests are retracted.
"""

from collections.abc import Iterable

from common.cache.kv_window import KVWindow
from common.request import Request

#: The default of ``--num-reserved-decode-tokens``.
RESERVED_TOKENS = 128


def reserved_room(request: Request, most: int, kv_window: KVWindow) -> int:
    """Tokens of room that are kept for the further output of a request, at most ``most``."""
    num_tokens = min(request.num_left, most)
    return min(num_tokens, kv_window.room_left(request)) if kv_window.is_bounded else num_tokens


def reserved_tokens(requests: Iterable[Request], most: int, kv_window: KVWindow) -> int:
    """Tokens of room that are kept for the further output of all these requests together."""
    return sum(reserved_room(request, most, kv_window) for request in requests)
