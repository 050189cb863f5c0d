"""Selects the tests that run: without ``--all``, slow tests are skipped, except the sample that their marker names, and
property tests try fewer examples. The longest tests run first, so that no process is left with one at the end.

Only pytest is imported when this file loads, so that a bare CUDA machine can run the engine's tests with it.
"""

import contextlib
import gc
import hashlib
import math
import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest

#: Several processes run tests at the same time, so that threads of torch in each would mostly wait for one another.
#: torch reads the variable when it is imported; a test that is about threads sets their number itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")
#: Tests beside this one make networks and remove them; UCX, which uses all that it finds, would fail.
os.environ.setdefault("UCX_NET_DEVICES", "lo")
#: In a command that a shell runs in the background, SIGINT is ignored, and it would be in processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
#: Without a GPU Triton's kernels are tested in its interpreter, which must be chosen before any test imports triton.
if not os.path.exists("/proc/driver/nvidia/version"):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too, not only a sample of them")
    parser.addoption("--sample-seed", type=int, default=0, help="seed of the sample of slow tests")


def pytest_configure(config: pytest.Config) -> None:
    """Turn hypothesis's time limits off: the duration of an example depends on how busy the machine is.

    Without ``--all``, property tests try a quarter of the examples; those that set a number do so by
    ``support.examples``, if they take seconds.
    """
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        num_examples = 100 if config.getoption("--all") else 25
        settings.register_profile(
            "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=num_examples
        )
        settings.load_profile("untimed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        _skip_slow(items, config.getoption("--sample-seed"))
    cuda_items = [item for item in items if item.get_closest_marker("cuda")]
    if cuda_items and not _has_cuda():
        for item in cuda_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=_max_seconds, reverse=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and freeze them: a collection would visit millions of objects.

    Many modules of tests end with a collection, which would take half a second each.
    """
    gc.disable()
    result = yield
    gc.enable()
    gc.collect()
    gc.freeze()
    return result


def _skip_slow(items: list[pytest.Item], seed: int) -> None:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for group in cases.values():
        mark = group[0].get_closest_marker("slow")
        assert mark is not None
        num_kept = math.ceil(mark.kwargs.get("sample", 0.0) * len(group))
        for item in _shuffled(group, seed)[num_kept:]:
            item.add_marker(pytest.mark.skip(reason="slow: runs with --all"))


def _shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest())


def _max_seconds(item: pytest.Item) -> float:
    """The time limit of a test that has its own, which is longer than the others'; 0 for all others."""
    mark = item.get_closest_marker("timeout")
    return mark.args[0] if mark else 0.0


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def _keys_of_all_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder for the keys of the control plane that the first of all tests and their processes makes.

    A later run of pytest removes it, also if this one is killed.
    """
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def _no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own BATON_* variables must not change what a test sees."""
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def context() -> Iterator[Any]:
    """A ZMQ context, which is closed with all its sockets even if the test fails."""
    import zmq

    made = zmq.Context()
    yield made
    made.destroy(linger=0)
