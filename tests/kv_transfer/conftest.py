"""Fixtures of tests whose nodes run in processes of their own."""

import gc
from collections.abc import Iterator

import pytest
from support.kv.transport_ends import fork_server, start, transport

__all__ = ["fork_server", "start", "transport"]


@pytest.fixture(autouse=True, scope="module")
def _collect_garbage() -> Iterator[None]:
    """Closes the memory files of pools that reference cycles keep; ``select`` takes no descriptor above 1,023."""
    yield
    gc.collect()
