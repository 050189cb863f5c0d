"""How often a decode step can be repeated with no change but one more token in each row. Pure.

Most steps of a decode node are like the one before: nothing arrives, ends or runs short. The simulator takes such steps
together (``DecodeScheduler.repeat``); the result is the same as step by step. What is counted here are commits with the
plan that follows each. A request that grows takes its pages as it would have step by step.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import NamedTuple

from common.request import Request
from common.step_plan import StepPlan


class Repeatable(NamedTuple):
    """An outstanding step that can be repeated, at most ``most`` times; ``rows`` are its requests."""

    rows: Sequence[Request]
    most: int


class Repeated(NamedTuple):
    """The step that is outstanding after repetitions.

    Attributes:
        plan: its rows, and every page that requests have got on the way.
        grown: the repetition, counted from 1, in which each of these pages was taken, in order.
    """

    plan: StepPlan
    grown: list[int]


def num_before_end(request: Request, tokens: Sequence[int], eos_token_ids: Collection[int]) -> int:
    """How many of the next ``tokens`` of a request come before the one that ends its output."""
    sampling = request.sampling
    count = min(request.num_left - 1, len(tokens))
    ends = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *eos_token_ids)
    for token in ends:
        if token in tokens:
            count = min(count, tokens.index(token))
    return count


def growth_instants(request: Request, count: int, page_size: int) -> range:
    """The repetitions, counted from 1, in which a request gets a page; its outstanding row is already scheduled."""
    first = len(request.pages) * page_size - request.num_scheduled + 1
    return range(first, count + 1, page_size)


def most_with_pages(rows: Sequence[Request], count: int, page_size: int, num_pages: int) -> int:
    """The most repetitions, at most ``count``, in which these requests take at most ``num_pages``."""
    if _num_grown(rows, count, page_size) <= num_pages:
        return count
    return bisect_right(range(count), num_pages, key=lambda fewer: _num_grown(rows, fewer, page_size)) - 1


def _num_grown(rows: Sequence[Request], count: int, page_size: int) -> int:
    return sum([len(growth_instants(request, count, page_size)) for request in rows])
