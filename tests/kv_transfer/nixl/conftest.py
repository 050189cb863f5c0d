"""Attachments through NIXL may take long on a busy machine."""

import pytest

from kv_transfer.transports.nixl import writer as nixl_writer


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_writer, "ATTACH_TIMEOUT_S", 60.0)
