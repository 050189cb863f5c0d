"""Fixtures of tests of transfers, most of whose nodes run in processes of their own."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.kv.kv_fakes import MemfdStore
from support.kv.raw_tcp_peer import RawTcpPeer
from support.kv.transfer_cluster import Cluster
from support.kv.transport_ends import TRANSPORTS, End
from support.service.fork_server import ForkServer, shared_fork_server

#: These with pages that never leave the GPUs.
ON_GPUS = ("cuda-ipc on a GPU", "nixl on a GPU", "nccl on two GPUs")


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    return shared_fork_server()


@pytest.fixture
def start(fork_server: ForkServer) -> Iterator[Callable[..., End]]:
    ends: list[End] = []

    def begin(role: str, transport: str, key: str = "", **environment: str) -> End:
        ends.append(End(fork_server, role, transport, key, **environment))
        return ends[-1]

    yield begin
    for end in ends:
        end.close()


@pytest.fixture(params=[*TRANSPORTS, *(pytest.param(name, marks=pytest.mark.cuda) for name in ON_GPUS)])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a transport. ``cuda-ipc`` uses a fake of the driver, except in tests marked ``cuda``."""
    name, _, is_on_gpu = str(request.param).partition(" ")
    if is_on_gpu:
        monkeypatch.setenv("TEST_GPU", "1")
    if name == "nccl" and len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) < 2:
        pytest.skip("NCCL needs two GPUs")
    return name


@pytest.fixture
def make_cluster(fork_server: ForkServer) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(transport: str, ranks: dict[str, int] | None = None) -> Cluster:
        made.append(Cluster(fork_server, transport, ranks))
        return made[-1]

    yield make
    for cluster in made:
        for end in cluster.ends.values():
            end.close()


@pytest.fixture
def store() -> Iterator[MemfdStore]:
    """A pool of eight pages."""
    store = MemfdStore(8)
    yield store
    store.close()


@pytest.fixture(autouse=True)
def _close_raw_peers() -> Iterator[None]:
    yield
    while RawTcpPeer.open_peers:
        RawTcpPeer.open_peers.pop().connection.close()


@pytest.fixture(autouse=True, scope="module")
def _collect_garbage() -> Iterator[None]:
    """Close the memory files of pools that reference cycles keep; ``select`` takes no descriptor above 1,023."""
    yield
    gc.collect()
