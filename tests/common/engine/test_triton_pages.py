"""The Triton kernel copies slices of any pages between a pool and contiguous memory, and touches nothing else."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.devices import DEVICES

from common.cache.page_layout import PageLayout

if not find_spec("triton"):
    pytest.skip("needs triton", allow_module_level=True)

import support.engine.triton_interpreter  # noqa: F401  (makes the interpreter faster)

from common.engine.kv_pool import KVPool
from common.engine.triton_kernels import has_interpreter
from common.engine.triton_kernels import pages as kernels
from common.engine.triton_kernels.pages import Runs, gather, scatter

PAGE_BYTES = 96


def runs_strategy(page_bytes: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Runs that do not overlap, in any order."""

    def between(cuts: list[int]) -> list[tuple[int, int]]:
        edges = sorted(cuts)
        return [(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=False)]

    cuts = st.lists(st.integers(0, page_bytes), min_size=2, max_size=8, unique=True)
    return cuts.map(between).flatmap(st.permutations).map(tuple)


@pytest.mark.parametrize("device", DEVICES)
def test_runs_of_pages_are_gathered_in_order_and_scattered_back(device: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(
        runs=runs_strategy(PAGE_BYTES),
        scale=st.sampled_from([1, 2, 8]),
        order=st.permutations(range(5)),
        num=st.integers(1, 5),
    )
    def check(runs: tuple[tuple[int, int], ...], scale: int, order: list[int], num: int) -> None:
        runs = tuple((offset * scale, length * scale) for offset, length in runs)  # words of different sizes
        random = np.random.default_rng(num)
        pool = torch.from_numpy(random.integers(0, 256, (5, PAGE_BYTES * scale), np.uint8))
        chosen = order[:num]
        prepared = Runs.make(runs, PAGE_BYTES * scale, torch.device(device))
        expected = torch.cat([pool[page, at : at + length] for page in chosen for at, length in runs])
        staging = torch.zeros(len(expected) + 8, dtype=torch.uint8, device=device)
        numbers = torch.tensor(chosen, device=device)
        gather(pool.to(device), numbers, prepared, staging)
        assert torch.equal(staging.cpu()[:-8], expected)
        assert not staging[-8:].any()

        target = torch.zeros_like(pool).to(device)
        scatter(target, numbers, prepared, staging)
        wanted = torch.zeros_like(pool)
        for page in chosen:
            for at, length in runs:
                wanted[page, at : at + length] = pool[page, at : at + length]
        assert torch.equal(target.cpu(), wanted)

    check()


@pytest.mark.parametrize("device", DEVICES)
def test_some_heads_of_every_layer_become_the_pages_of_one_rank(device: str) -> None:
    """The runs of heads 1 and 2 of four: as many bytes as a page of a pool with two heads, in the same order."""
    layout, part = PageLayout(3, 4, 8, 2, "bfloat16"), PageLayout(3, 2, 8, 2, "bfloat16")
    pool = torch.randint(0, 256, (4, layout.page_bytes), dtype=torch.uint8)
    head_bytes = part.page_bytes // (3 * 2 * 2)
    runs = tuple(
        (layout.offset(0, layer=layer, value=value, head=1), 2 * head_bytes)
        for layer in range(3)
        for value in (False, True)
    )
    prepared = Runs.make(runs, layout.page_bytes, torch.device(device))
    assert (prepared.num_bytes, prepared.word_bytes) == (part.page_bytes, 8)
    staging = torch.empty(2, part.page_bytes, dtype=torch.uint8, device=device)
    gather(pool.to(device), torch.tensor([3, 1], device=device), prepared, staging)
    heads = pool[[3, 1]].view(2, 3, 2, 4, head_bytes)[:, :, :, 1:3]
    assert torch.equal(staging.cpu(), heads.reshape(2, -1))


@pytest.mark.parametrize("device", DEVICES)
def test_pages_far_behind_the_first_are_copied(device: str) -> None:
    """Offsets of their bytes do not fit into 32 bits. On a CPU the pool is a sparse file."""
    layout = PageLayout(1, 2, 64, 64, "bfloat16")
    pool = KVPool(layout, (1 << 32) // layout.page_bytes + 1, device)
    last, runs = pool.num_pages - 1, Runs.make(((1, 5), (8, 3)), layout.page_bytes, pool.device)
    assert runs.word_bytes == 1
    sent, came = torch.arange(1, 9, dtype=torch.uint8, device=device), torch.zeros(8, dtype=torch.uint8, device=device)
    numbers = torch.tensor([last], device=device)
    scatter(pool.pages, numbers, runs, sent)
    assert pool.pages[last, :12].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 6, 7, 8, 0]
    gather(pool.pages, numbers, runs, came)
    assert torch.equal(came, sent)
    pool.close()


class PoolWithDevice(KVPool):
    """A pool on the CPU that says that its memory is a device's."""

    @property
    def device_pages(self) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8).view(self.num_pages, self.layout.page_bytes)


@pytest.mark.skipif(not has_interpreter(), reason="needs Triton's interpreter")
def test_slices_for_pages_of_another_size_are_put_together_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of each of our pages is a page of the peer's: what leaves and what comes are as without the kernel."""
    from kv_transfer.page_mapping import PageMapping  # needs packages that a bare GPU machine may lack
    from kv_transfer.transports.torch_distributed.backend import Pages

    ours, theirs = PageLayout(2, 2, 4, 16, "float32"), PageLayout(2, 2, 4, 8, "float32")
    pair = PageMapping(ours, theirs).slice_pairs[1]
    assert pair is not None
    pool = PoolWithDevice(ours, 3)
    pool.pages.random_()
    with_kernel, without = Pages(pool, "nccl"), Pages(pool, "gloo")
    monkeypatch.setattr("kv_transfer.transports.torch_distributed.backend._copy", None)
    sent = with_kernel.gather(1, pair, with_kernel.staging())
    monkeypatch.undo()
    assert torch.equal(sent, without.gather(1, pair, without.staging()))

    runs = [(at, length) for at, _, length in pair.runs]
    before = pool.device_pages.clone()
    with_kernel.scatter(2, runs, sent)
    by_kernel = pool.device_pages.clone()
    pool.device_pages.copy_(before)
    without.scatter(2, runs, sent)
    assert torch.equal(by_kernel, pool.device_pages)
    assert not torch.equal(by_kernel, before)
    pool.close()


@pytest.mark.cuda
def test_a_pool_on_a_gpu_gathers_and_scatters() -> None:
    layout = PageLayout(3, 4, 8, 16, "bfloat16")
    pool = KVPool(layout, 4, "cuda")
    pool.pages.random_()
    assert pool.can_copy_runs and pool.device_pages is not None
    runs = ((0, 256), (2048, 512))
    staging = torch.empty(2, 768, dtype=torch.uint8, device="cuda")
    pool.gather((3, 0), runs, staging)
    expected = torch.stack([torch.cat((page[:256], page[2048:2560])) for page in pool.device_pages[[3, 0]]])
    assert torch.equal(staging, expected)
    before = pool.device_pages.clone()
    pool.scatter((1, 2), runs, staging)
    before[1:3, :256], before[1:3, 2048:2560] = staging[:, :256], staging[:, 256:]
    assert torch.equal(pool.device_pages, before)
    pool.close()


@pytest.mark.cuda
def test_runs_are_on_the_gpu_once_they_are_made() -> None:
    """The stream of another thread may be the next to read them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 28)  # cycles, for which a copy on this stream waits
        Runs.make(((0, 8),), PAGE_BYTES, torch.device("cuda"))
        assert stream.query()


def test_the_number_of_pages_and_runs_changes_the_grid_and_not_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(kernels, "copy_runs", Recorded())
    runs = Runs.make(((0, 65536), (131072, 8)), 1 << 20, torch.device("cpu"))
    pool = torch.empty(3, 1 << 20, dtype=torch.uint8)
    gather(pool, torch.tensor([2, 0]), runs, torch.empty(1 << 18, dtype=torch.uint8))
    assert grids == [(2, 2, 2)], "8,192 words in blocks of 4,096"
