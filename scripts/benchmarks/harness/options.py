"""Option types that the benchmarks share."""

import argparse
from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")

TRANSPORTS = ("shm", "cuda-ipc", "tcp", "nixl", "gloo", "nccl")


def comma_separated(kind: Callable[[str], T], *, among: Collection[T] = ()) -> Callable[[str], tuple[T, ...]]:
    """An argparse type for values separated by commas; ``among`` holds the allowed values, if not all are."""

    def parse(text: str) -> tuple[T, ...]:
        try:
            values = tuple(kind(word) for word in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers separated by commas") from None
        if unknown := [value for value in values if among and value not in among]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(map(str, among))}")
        return values

    return parse


def num_nodes(text: str) -> tuple[int, int]:
    """Parse numbers of prefill and decode nodes, such as 2+1. Raises ValueError: they are not two numbers."""
    prefill, decode = map(int, text.split("+"))
    return prefill, decode
