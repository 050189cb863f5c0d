"""Kernel launches, host syncs and bytes of a decode step on a GPU, counted without one.

The engine runs on torch's ``meta`` device, which has shapes and no data, with the kernels of Triton replaced by ones
that only count. An operation of torch that computes counts as one launch, although some need several; a graph counts as
one. A sync is an operation for which the host waits before it has launched the step. Bytes are those of all arguments
and results of all launches; the least that a step can move are its weights, and the KV of its context.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.cache.page_layout import ITEM_BYTES, PageLayout
from common.engine.attention.protocol import AttentionParams
from common.engine.cuda_graphs import batch_sizes_to_capture
from common.engine.executor import TorchExecutor
from common.engine.kv_pool import TORCH_DTYPES, LayerKV, layer_views
from common.engine.models.config import ModelConfig
from common.engine.models.decoder import Decoder, allocate_weights
from common.errors import ConfigError
from common.sampling_params import SamplingParams
from common.step_plan import Admit, PageDelta, Row, StepPlan
from scripts.benchmarks.engines.engine import linear_parameters, model_shape
from scripts.load_tester.reporting.formats import counted

SHORTEST = ("--layers=2", "--batch=3", "--context=64")
PAGE_SIZE = 16
#: Programs that keep an H100 busy: two for each of its multiprocessors.
NUM_PROGRAMS = 264
META = torch.device("meta")
KINDS = {"greedy": SamplingParams(temperature=0.0), "top-p": SamplingParams(temperature=0.8, top_p=0.9)}
#: Operations for which the host waits.
SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "is_nonzero", "equal")
#: Operations by which torch assigns a number. On CUDA that is a copy from the host for which it waits.
ASSIGNMENTS = ("copy_", "index_put_")
#: Operations that read only as much of their first argument as they return.
LOOKUPS = ("embedding", "index", "index_select", "gather")
#: Operations that change only as much of their first argument as their last has.
PARTIAL_WRITES = ("index_put_", "scatter_", "index_copy_")


@dataclass
class StepCounts:
    """What the launch of a step did.

    Attributes:
        launches: by name.
        copied_bytes: from the host to the device.
        moved_bytes: read and written by kernels.
    """

    launches: Counter[str]
    num_syncs: int = 0
    copied_bytes: int = 0
    moved_bytes: int = 0

    @property
    def num_launches(self) -> int:
        return self.launches.total()


@dataclass(frozen=True)
class Comparison:
    """The same step without and with a graph."""

    batch: int
    kind: str
    eager: StepCounts
    with_graph: StepCounts
    least_bytes: int


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16, 64, 256], help="batch sizes (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="cached tokens of each row (%(default)s)")
    parser.add_argument("--layers", type=int, default=28, help="layers of Qwen3-0.6B's shape (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(TORCH_DTYPES), help="(%(default)s)")


def run(options: argparse.Namespace) -> dict[str, float]:
    layers = counted(options.layers, "layer")
    print(f"{layers} of Qwen3-0.6B's shape, {options.dtype}, {options.context} tokens of context")
    columns = ("launches", "with graph", "syncs", "to device, B", "moved, MB", "least, MB", "ratio")
    print(f"{'':<18}" + "".join(f"{name:>13}" for name in columns), flush=True)
    figures: dict[str, float] = {}
    for one in compare(options.batch, context=options.context, num_layers=options.layers, dtype=options.dtype):
        eager, ours, name = one.eager, one.with_graph, f"batch {one.batch}, {one.kind}"
        counts = (eager.num_launches, ours.num_launches, eager.num_syncs + ours.num_syncs, ours.copied_bytes)
        megabytes = (ours.moved_bytes / 1e6, one.least_bytes / 1e6, ours.moved_bytes / one.least_bytes)
        print(
            f"{name:<18}" + "".join(f"{n:>13}" for n in counts) + "".join(f"{n:>13.2f}" for n in megabytes), flush=True
        )
        figures[f"{name}, launches"] = eager.num_launches
        figures[f"{name}, launches with a graph"] = ours.num_launches
        figures[f"{name}, bytes to the device"] = ours.copied_bytes
        figures[f"{name}, bytes over least"] = ours.moved_bytes / one.least_bytes
    return figures


def compare(batches: Sequence[int], *, context: int, num_layers: int, dtype: str) -> Iterator[Comparison]:
    """Count the steps of every batch size and kind of sampling."""
    config = model_shape(num_layers)
    # Weights, embedded tokens, KV that is read, and KV that is written.
    weights = linear_parameters(config, with_head=True) * ITEM_BYTES[dtype]
    kv = config.layout(PAGE_SIZE, dtype).page_bytes // PAGE_SIZE * (context + 1)
    with counting_kernels() as counter:
        for batch in batches:
            for kind, params in KINDS.items():
                eager, with_graph = (
                    count_step(config, batch, params, counter, context=context, dtype=dtype, has_graphs=has_graphs)
                    for has_graphs in (False, True)
                )
                yield Comparison(batch, kind, eager, with_graph, weights + batch * kv)


def count_step(
    config: ModelConfig,
    batch: int,
    params: SamplingParams,
    counter: "LaunchCounter",
    *,
    context: int,
    dtype: str,
    has_graphs: bool,
) -> StepCounts:
    """Count the second decode step of a batch, which needs no new page."""
    start = context - 2  # so that the counted step attends to ``context`` tokens, its own included
    executor = make_executor(config, batch, counter, context=context, dtype=dtype)
    if has_graphs:
        executor.capture_graphs(GraphCounter(counter), batch_sizes_to_capture(batch)[-1:])
    pages = -(-context // PAGE_SIZE)
    admits = tuple(Admit(slot, params, 1, 1) for slot in range(batch))
    deltas = tuple(PageDelta(slot, 0, tuple(range(slot * pages, (slot + 1) * pages))) for slot in range(batch))
    plans = [
        StepPlan(step, *changes, tuple(Row(slot, start + step, None, True) for slot in range(batch)))
        for step, changes in enumerate(((admits, deltas), ((), ())))
    ]
    counter.context = context
    with counter:
        executor.launch(plans[0])
        counter.begin()
        executor.launch(plans[1])
    executor.close()
    return counter.begin()


def make_executor(
    config: ModelConfig, batch: int, counter: "LaunchCounter", *, context: int, dtype: str
) -> TorchExecutor:
    from common.engine.attention.triton_backend import TritonAttention
    from common.engine.triton_kernels.elementwise import TritonOperations

    weights, _ = allocate_weights(config, TORCH_DTYPES[dtype], META)
    pool: Any = PoolWithoutData(config.layout(PAGE_SIZE, dtype), batch * -(-context // PAGE_SIZE) + 1)
    counter.pool = pool
    attention = TritonAttention(
        pool, config.num_heads, (AttentionParams(),) * config.num_layers, num_programs=NUM_PROGRAMS, tiles={}
    )
    with patch("common.engine.models.decoder.make_operations", lambda *_: TritonOperations()):  # as on CUDA
        model = Decoder(config, weights)
    return TorchExecutor(model, pool, attention, num_slots=batch)


class PoolWithoutData:
    """A ``KVPool`` on the ``meta`` device."""

    device = META
    groups = None

    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_layers = layout.num_layers
        self.num_pages = self.num_full_pages = num_pages
        self.pages = torch.empty(num_pages, layout.page_bytes, dtype=torch.uint8, device=META)
        self._layers = [layer_views(self.pages, layout, layer) for layer in range(layout.num_layers)]

    def layer(self, index: int) -> LayerKV:
        return self._layers[index]

    def close(self) -> None:
        pass


# ---- counting --------------------------------------------------------------------------------------------------------


class LaunchCounter(TorchDispatchMode):
    """Counts the operations of torch on the ``meta`` device, and the kernels that ``counting_kernels`` has replaced.

    Attributes:
        pool, context: where keys and values are, and how many tokens each row attends to.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pool: PoolWithoutData | None = None
        self.context = 0
        self.counts = StepCounts(Counter())
        self._number: Tensor | None = None  # the last one that was made of a number of the host

    def begin(self) -> StepCounts:
        """Start counting from zero, and return what was counted so far."""
        counted, self.counts = self.counts, StepCounts(Counter())
        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        given, returned = _tensors((args, kwargs)), _tensors(found)
        if name in SYNCS:
            self.counts.num_syncs += 1
        elif any(tensor.device == META for tensor in returned):
            if any(tensor.device != META for tensor in given) and name in ("to", "_to_copy", "copy_"):
                self._copy(func, args, kwargs or {}, returned[0])
            elif not _is_free(func, given, returned):
                self.counts.launches[name] += 1
                self.counts.moved_bytes += _bytes_of(name, given, returned)
                self.counts.num_syncs += name in ASSIGNMENTS and given[-1] is self._number
            if name == "scalar_tensor":
                self._number = returned[0]
        return found

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any], target: Tensor) -> None:
        names = [argument.name for argument in func._schema.arguments]
        is_non_blocking = {**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking")
        self.counts.num_syncs += not is_non_blocking
        self.counts.launches["copy to the device"] += 1
        self.counts.copied_bytes += target.nbytes

    def kernel(self, name: str, args: Sequence[Any]) -> None:
        """Count a launch of a kernel of Triton."""
        self.counts.launches[name] += 1
        assert self.pool is not None
        pool = self.pool.pages.untyped_storage()._cdata
        tensors = {id(one): one for one in args if isinstance(one, Tensor)}.values()
        own = [one for one in tensors if one.untyped_storage()._cdata != pool]
        self.counts.moved_bytes += sum(map(_nbytes, own))
        if len(own) < len(tensors):
            num_rows = len(args[0])  # of queries, or of keys
            num_tokens = self.context if "attention" in name else 1
            self.counts.moved_bytes += num_rows * num_tokens * self.pool.layout.layer_bytes // PAGE_SIZE


class GraphCounter:
    """A stand-in for CUDA graphs: what is captured counts as one launch, and moves what it moved."""

    def __init__(self, counter: LaunchCounter) -> None:
        self._counter = counter

    def capture(self, launch: Callable[[], None]) -> "CountedGraph":
        with self._counter:
            self._counter.begin()
            launch()
        return CountedGraph(self._counter, self._counter.begin())


@dataclass(frozen=True)
class CountedGraph:
    counter: LaunchCounter
    captured: StepCounts

    def replay(self) -> None:
        self.counter.counts.launches["graph"] += 1
        self.counter.counts.num_syncs += self.captured.num_syncs
        self.counter.counts.copied_bytes += self.captured.copied_bytes
        self.counter.counts.moved_bytes += self.captured.moved_bytes


@contextmanager
def counting_kernels() -> Iterator[LaunchCounter]:
    """Replace the kernels of Triton, wherever the engine has imported them, by ones that only count."""
    try:
        from triton.runtime import KernelInterface
    except ImportError as error:
        raise ConfigError("bench launches counts the kernels of Triton: install triton") from error
    from common.engine.attention import triton_backend  # noqa: F401  # so that the kernels are imported
    from common.engine.triton_kernels import elementwise, sampling  # noqa: F401

    counter = LaunchCounter()
    replaced = [
        (module, name, kernel)
        for module_name, module in sorted(sys.modules.items())
        if module_name.startswith("common.engine.")
        for name, kernel in vars(module).items()
        if isinstance(kernel, KernelInterface)
    ]
    for module, name, _ in replaced:
        setattr(module, name, _CountedKernel(counter, name))
    try:
        with patch("common.engine.sampling.sampler._has_kernels", lambda _: True):  # as on CUDA
            yield counter
    finally:
        for module, name, kernel in replaced:
            setattr(module, name, kernel)


@dataclass(frozen=True)
class _CountedKernel:
    counter: LaunchCounter
    name: str

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **_: self.counter.kernel(self.name, args)


def _is_free(func: Any, given: Sequence[Tensor], returned: Sequence[Tensor]) -> bool:
    """Whether an operation launches nothing: it returns a view, or memory without content."""
    if any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.returns):
        return False
    memory = {tensor.untyped_storage()._cdata for tensor in given}
    is_view = any(tensor.untyped_storage()._cdata in memory for tensor in returned)
    return is_view or func._schema.name.removeprefix("aten::") in ("empty", "empty_like", "empty_strided", "new_empty")


def _bytes_of(name: str, given: Sequence[Tensor], returned: Sequence[Tensor]) -> int:
    """Bytes that an operation reads and writes."""
    written = sum(map(_nbytes, returned))
    if name == "copy_":
        return written + _nbytes(given[1])
    if name in LOOKUPS:
        return 2 * written + sum(map(_nbytes, given[1:]))
    if name in PARTIAL_WRITES:
        return sum(map(_nbytes, given[1:])) + _nbytes(given[-1])
    return written + sum(map(_nbytes, given))


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor; those of a tensor that is expanded count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
