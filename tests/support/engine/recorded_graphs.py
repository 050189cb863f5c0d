"""A stand-in for CUDA graphs on the CPU. It is a fake: nothing is launched at once, and nothing becomes faster.

It keeps every operation of a step with its arguments, tensors and numbers, and replays them as they were. As with a
real graph, a step is right only if all that differs between two steps is in tensors that stay where they are: a number
that the host computed for the step of the capture would come back in all others.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from common.engine.attention.protocol import AttentionBackend, StepAttention, write_kv
from common.engine.attention.torch_sdpa import TorchAttention
from common.engine.batch import DecodeRows, StepBatch
from common.engine.executor import TorchExecutor
from common.engine.kv_pool import KVPool
from common.engine.models.checkpoints.weights import load_weights
from common.engine.models.config import ModelConfig
from common.engine.models.decoder import Decoder
from common.engine.models.layers import TorchOperations
from common.engine.sampling.grammar import load_compiler

#: A function of torch or a kernel of Triton with its arguments, and what it returned.
Operation = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class RecordedGraph:
    def __init__(self, operations: list[Operation]) -> None:
        self.operations = operations
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for function, args, kwargs, recorded in self.operations:
            fresh = function(*args, **kwargs)
            for old, new in zip(_tensors(recorded), _tensors(fresh), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor an operation in place
                    old.copy_(new)


class GraphRecorder(TorchDispatchMode):
    """A ``GraphRunner`` that records operations of torch, and kernels that ``watch_kernels`` has replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[RecordedGraph] = []
        self._operations: list[Operation] | None = None

    def capture(self, launch: Callable[[], None]) -> RecordedGraph:
        launch()  # as the warm-up of a real one
        operations = self._operations = []
        with self:
            launch()
        self._operations = None
        self.graphs.append(RecordedGraph(operations))
        return self.graphs[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a number from the device"
        self.record(func, args, kwargs or {}, found)
        return found

    def record(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], found: Any) -> None:
        if self._operations is not None:
            self._operations.append((function, args, kwargs, found))

    def watch_kernels(self, module: Any, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        """Record the launches of these kernels of a module, which Triton's interpreter runs."""
        for name in names:
            monkeypatch.setattr(module, name, _WatchedKernel(self, getattr(module, name)))


class _WatchedKernel:
    def __init__(self, recorder: GraphRecorder, kernel: Any) -> None:
        self._recorder = recorder
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():  # the interpreter uses torch
                self._kernel[grid](*args, **kwargs)

        def launch_and_record(*args: Any, **kwargs: Any) -> None:
            launch(*args, **kwargs)
            self._recorder.record(launch, args, kwargs, None)

        return launch_and_record


class GatheringAttention:
    """A ``GraphSafeAttention`` of torch's operations: decode rows gather the pages of a whole context.

    Other rows are those of ``TorchAttention``.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._plain = make_plain(pool)

    def prepare(self, batch: StepBatch) -> StepAttention:
        return self._plain.prepare(batch)

    def prepare_decode(self, rows: DecodeRows) -> "_GatheringStep":
        return _GatheringStep(self.pool, rows)


class _GatheringStep:
    def __init__(self, pool: KVPool, rows: DecodeRows) -> None:
        self._pool = pool
        self._rows = rows
        self._table = rows.page_table[rows.slots].long()
        places = torch.arange(self._table.shape[1] * pool.layout.page_size)
        self._is_hidden = (places > rows.positions[:, None])[:, None, :, None]  # [R, 1, tokens, 1]

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self._pool.layer(layer)
        write_kv(kv, k, v, self._rows)
        keys, values = (
            paged[self._table].transpose(1, 2).flatten(2, 3).masked_fill(self._is_hidden, 0) for paged in kv[:2]
        )
        grouped = q.view(len(q), keys.shape[1], -1, q.shape[2])
        scores = grouped @ keys.mT * q.shape[2] ** -0.5
        weights = scores.masked_fill(self._is_hidden.mT, float("-inf")).softmax(dim=-1)
        return (weights @ values).reshape(q.shape)


def make_plain(pool: KVPool) -> TorchAttention:
    from common.engine.attention import make_attention

    made = make_attention("torch", pool, pool.layout.num_kv_heads)
    assert isinstance(made, TorchAttention)
    return made


def load_with_torch(
    config: ModelConfig,
    *,
    num_slots: int,
    num_pages: int,
    page_size: int,
    attention: Callable[[KVPool], AttentionBackend] = GatheringAttention,
    operations: Callable[[], Any] = TorchOperations,
) -> TorchExecutor:
    """Return a float32 executor on the CPU without the compiled kernels, which a ``GraphRecorder`` would not see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.engine.models.decoder.make_operations", lambda *_: operations())
        model = Decoder(config, load_weights(config, "float32", torch.device("cpu")))
    pool = KVPool(config.layout(page_size, "float32"), num_pages)
    grammars = load_compiler(config.folder, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)
    return TorchExecutor(model, pool, attention(pool), num_slots=num_slots, grammars=grammars)


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
