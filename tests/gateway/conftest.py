"""Fixtures of all tests of the gateway."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _collect_garbage() -> Iterator[None]:
    """Lets what a test has left open fail its own module: otherwise any later test fails, of any module."""
    yield
    gc.collect()
