"""When those under way will have ended, from what they have said so far: for a service where none has yet. Pure.

An output goes on at the pace at which its tokens have come. How many are left is known if its length is (the end token
is ignored), and expected if outputs like it have been seen; any other may well say as much again as it has, within what
it is allowed.
"""

import heapq
from collections.abc import Iterable

from gateway.requests.output_processor import OutputStream


def seconds_until(count: int, relays: Iterable[OutputStream]) -> float:
    """In how many seconds so many of these outputs will have ended; 0.0 if not one has said enough to tell.

    If fewer have, the others are taken to follow at the same rate.
    """
    left = heapq.nsmallest(count, [seconds_left(relay) for relay in relays if len(relay.ids) > 1])
    return left[-1] * count / len(left) if left else 0.0


def seconds_left(relay: OutputStream) -> float:
    """Until this output, which has said two tokens or more, will have ended."""
    num_said, ask = len(relay.ids), relay.ask
    num_left = ask.expected_output - num_said
    if num_left <= 0:
        num_left = min(num_said, ask.sampling.max_new_tokens - num_said)
    return num_left * (relay.last_at - relay.first_at) / (num_said - 1)
