"""Decode steps as CUDA graphs: one launch for all kernels of a step, from its tokens to its logits.

A graph runs the same kernels on the same memory every time. What differs between two steps is therefore in
``DecodeInputs``, which stays where it is, and the kernels read it there: the host decides nothing but the number of
rows. There is a graph for some numbers of rows, the batch sizes; a step with fewer rows is padded. Padding rows belong
to a slot of their own, whose only page is given to no request, so that they write and read nothing that is alive.

Sampling comes after the graph. Steps with rows of other kinds, or with more rows than the largest graph, run eagerly.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.attention.protocol import GraphSafeAttention
from common.engine.batch import DecodeRows
from common.engine.device_copies import copy_into, to_device
from common.engine.models.protocol import CausalModel
from common.step_plan import PageDelta

#: Runs before the capture, in which kernels are compiled and libraries take their workspaces.
NUM_WARM_UPS = 2


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Launch it behind all that has been launched before."""
        ...


class GraphRunner(Protocol):
    """Captures functions that launch work on a device."""

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Call ``launch`` and keep what it launches. It is called more than once."""
        ...


class CudaGraphRunner:
    """Captures CUDA graphs that share their memory, which is sound because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # the default stream cannot be captured
        self._memory = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], None]) -> "torch.cuda.CUDAGraph":
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                launch()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile, such as those of transports: only this one must not.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            launch()
        return graph


class DecodeInputs:
    """What differs between two decode steps, in device memory that stays where it is.

    Args:
        last_tokens: ``[slots + 1]`` int64, the token sampled last in each slot; the last entry is that of padding rows.
        page_table: ``[slots, W]`` int32, the page tables of the slots so far.
        padding_page: of the padding rows.
    """

    def __init__(
        self, last_tokens: Tensor, page_table: NDArray[np.int32], *, page_size: int, padding_page: int
    ) -> None:
        num_slots, self._width = page_table.shape
        assert len(last_tokens) == num_slots + 1
        device = last_tokens.device
        self.last_tokens = last_tokens
        self._page_table = torch.zeros(num_slots + 1, self._width, dtype=torch.int32, device=device)
        self._page_table[:-1].copy_(torch.from_numpy(page_table))
        self._page_table[-1, 0] = padding_page
        self._page_size = page_size
        self._padding_row = np.array([num_slots, 0, padding_page, 0], np.int64)
        self._staged = torch.empty(4 * (num_slots + 1), dtype=torch.int64, device=device)

    def set_pages(self, deltas: Iterable[PageDelta]) -> None:
        """Change the page tables, behind all that has been launched before."""
        entries: dict[int, int] = {}
        for delta in deltas:
            first = delta.slot * self._width + delta.first
            entries.update(zip(range(first, first + len(delta.pages)), delta.pages, strict=True))
        if entries:
            places = to_device(np.array([[*entries], [*entries.values()]], np.int64), self._page_table.device)
            self._page_table.view(-1).scatter_(0, places[0], places[1].to(torch.int32))

    def stage(self, slots: Sequence[int], positions: Sequence[int], pages: Sequence[int], batch_size: int) -> None:
        """Copy the rows of the next step to the device, and padding rows after them.

        Args:
            positions, pages: of each row's new token.
        """
        rows = np.repeat(self._padding_row[:, None], batch_size, axis=1)
        offsets = np.array(positions, np.int64) % self._page_size
        rows[:, : len(slots)] = slots, positions, pages, offsets
        copy_into(self._staged[: rows.size], rows.reshape(-1))

    def rows(self, batch_size: int) -> DecodeRows:
        """The staged rows: views, whose content the next ``stage`` changes."""
        slots, positions, pages, offsets = self._staged[: 4 * batch_size].view(4, batch_size)
        return DecodeRows(slots, positions, pages, offsets, self._page_table)


class DecodeGraphs:
    """The decode steps of one model, captured for some batch sizes.

    Args:
        progress: called after each capture with the number of graphs so far.
    """

    def __init__(
        self,
        model: CausalModel,
        attention: GraphSafeAttention,
        inputs: DecodeInputs,
        runner: GraphRunner,
        batch_sizes: Iterable[int],
        *,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self.batch_sizes = sorted(batch_sizes)
        shape = (self.batch_sizes[-1], model.config.vocab_size)
        self._logits = torch.empty(shape, dtype=torch.float32, device=inputs.last_tokens.device)
        self._graphs: dict[int, Graph] = {}
        for batch_size in reversed(self.batch_sizes):  # the smaller ones fit into the memory of the largest
            inputs.stage((), (), (), batch_size)
            self._graphs[batch_size] = runner.capture(partial(self._compute, batch_size))
            progress(len(self._graphs))

    def fits(self, num_rows: int) -> bool:
        """Whether there is a graph for a batch of this many rows."""
        return num_rows <= self.batch_sizes[-1]

    def set_pages(self, deltas: Iterable[PageDelta]) -> None:
        self._inputs.set_pages(deltas)

    def launch(self, slots: Sequence[int], positions: Sequence[int], pages: Sequence[int]) -> Tensor:
        """Launch the step of these rows, as in ``DecodeInputs.stage``.

        Returns:
            ``[rows, vocab]`` float32, logits; they may be changed, and last until the next launch.
        """
        batch_size = next(size for size in self.batch_sizes if size >= len(slots))
        self._inputs.stage(slots, positions, pages, batch_size)
        self._graphs[batch_size].replay()
        return self._logits[: len(slots)]

    def _compute(self, batch_size: int) -> None:
        """The step itself. All that it reads is in the inputs, and its launches depend on the batch size alone."""
        rows = self._inputs.rows(batch_size)
        tokens = self._inputs.last_tokens[rows.slots]
        hidden = self._model.hidden_states(tokens, rows.positions, self._attention.prepare_decode(rows))
        self._model.logits(hidden, self._logits[:batch_size])


def batch_sizes_to_capture(largest: int) -> tuple[int, ...]:
    """Return the batch sizes up to ``largest``, ascending: 1, 2, 4, then 8 apart, and farther apart from 64 on."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, largest, 64)]
    return (*(size for size in sizes if size < largest), largest)
