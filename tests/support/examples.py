"""The number of examples of property tests that take seconds."""

import math

from hypothesis import settings


def examples(number: int) -> int:
    """Return ``number`` with ``--all``, and otherwise a quarter of it; see ``tests/conftest.py``."""
    return math.ceil(number * settings().max_examples / 100)
