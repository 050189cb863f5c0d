"""A decode node opens its writer when a request moves first, which may be when nothing more can be opened."""

import threading

import pytest
from support.kv.kv_fakes import PREFILL, MemfdStore
from support.kv.shm_ends import open_descriptors
from support.thread_limit import refuse_thread

from kv_transfer.transports import factory
from kv_transfer.transports.factory import TransportSettings, open_writer

SETTINGS = TransportSettings("auto", PREFILL)


def test_a_writer_for_which_there_is_no_thread_leaves_no_descriptor(
    store: MemfdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_before = open_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(OSError, match="no further thread can be started"):
            open_writer(store, SETTINGS)
    assert open_descriptors() <= num_before  # fewer, if an earlier test has left some that are closed meanwhile
    open_writer(store, SETTINGS).close()


def test_transports_that_were_opened_before_one_that_cannot_be_are_closed(
    store: MemfdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no descriptor is left")

    num_descriptors, num_threads = open_descriptors(), threading.active_count()
    with monkeypatch.context() as patched:
        patched.setattr(factory, "TcpWriter", refuse)
        with pytest.raises(OSError, match="no descriptor is left"):
            open_writer(store, SETTINGS)
    assert open_descriptors() <= num_descriptors
    assert threading.active_count() <= num_threads
