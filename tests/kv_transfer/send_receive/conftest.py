"""A connected sender and receiver."""

import pytest
from support.kv.kv_fakes import TransferPair


@pytest.fixture
def pair() -> TransferPair:
    pair = TransferPair()
    pair.connect()
    return pair
