"""Fixtures of all tests of the gateway."""

import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.gateway.fake_nodes import Stack, make_model_folder, running


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model; read-only."""
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stack(folder: Path) -> AsyncIterator[Stack]:
    """A gateway with a pair of nodes. At the end no request is left."""
    async with running(folder) as made:
        await made.pair()
        yield made
        assert (await made.get("/server_info"))[1]["num_in_flight"] == 0
        _, answer = await made.get("/v1/workers")
        assert {worker["load_tokens"] for worker in answer["workers"]} == {0}


@pytest.fixture(autouse=True, scope="module")
def _collect_garbage() -> Iterator[None]:
    """Let what a test has left open fail its own module: otherwise any later test fails, of any module."""
    yield
    gc.collect()
