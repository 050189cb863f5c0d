"""How rank 0 has a step computed by the other ranks, and how they compute it.

Rank 0 has the executor: it alone knows requests, samples, and moves pages. In each step it sends the other ranks the
rows as integers, and then all ranks run their part of the model together. The other ranks hold no state of requests;
the ids of the tokens, of which some were sampled a step ago and never left the device, come to them by a broadcast.

LoRA adapters are loaded by all ranks, each for its part of the model. Rank 0 numbers them; a step has the number of the
adapter of each row.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.attention import make_attention
from common.engine.batch import RowArrays, make_batch
from common.engine.device_copies import to_device
from common.engine.kv_pool import KVPool
from common.engine.models.lora.adapters import LoraWeights, StepAdapters
from common.engine.models.lora.checkpoint import read_adapter
from common.engine.models.protocol import CausalModel
from common.engine.tensor_parallel.group import RankGroup
from common.errors import ConfigError


class OtherRanks(Protocol):
    """The other ranks of a node, as rank 0 sees them.

    Attributes:
        num_ranks: including rank 0.
    """

    num_ranks: int

    def join(self, pool: KVPool) -> RankGroup:
        """Have the other ranks, which have loaded their weights, make pools as large as rank 0's ``pool``, and form the
        group with them.

        Raises:
            ConfigError: the group cannot be formed.
        """
        ...

    def begin(self, rows: RowArrays, kept: NDArray[np.int64], adapters: Sequence[int]) -> None:
        """Have the other ranks compute a step.

        Args:
            kept: indices of the tokens whose hidden states are wanted, as for ``CausalModel.hidden_states``.
            adapters: the number of each row's adapter, 0 for none; empty if no row has one.
        Raises:
            RankLostError: one of them does not answer.
        """
        ...

    def read_adapter(self, number: int, digest: str, folder: Path, *, max_rank: int, root: Path | None) -> None:
        """Have the other ranks read an adapter, while steps go on, and wait for them; safe on any thread.

        Args:
            number: of the adapter in the steps that follow.
            digest: of what rank 0 has read.
            folder, max_rank, root: as for ``common.engine.models.lora.checkpoint.read_adapter``.
        Raises:
            ConfigError: one of them cannot read it.
            RankLostError: one of them does not answer.
        """
        ...

    def drop_adapter(self, number: int) -> None:
        """Have the other ranks forget an adapter that no further step has; safe on any thread."""
        ...


class RankExecutor:
    """Computes the steps of rank 0 on another rank.

    Args:
        model: the part of this rank.
        pool: of this rank, with its KV heads.
        attention: resolved name of the backend.
    """

    def __init__(self, model: CausalModel, pool: KVPool, attention: str) -> None:
        self._model = model
        self._attention = make_attention(attention, pool, model.config.num_heads, model.attention_params)
        self._device = pool.device
        self._adapters: dict[int, LoraWeights] = {}

    def read_adapter(self, number: int, digest: str, folder: Path, *, max_rank: int, root: Path | None) -> None:
        """As ``OtherRanks.read_adapter``; safe on any thread.

        Raises:
            ConfigError: the adapter cannot be read, or is another one than that of rank 0.
        """
        checkpoint = read_adapter(folder, self._model.adaptable, max_rank=max_rank, root=root)
        if checkpoint.digest != digest:
            raise ConfigError(f"{folder}: has changed while it was loaded; load it again")
        self._adapters[number] = self._model.make_lora(checkpoint)

    def drop_adapters(self, numbers: Iterable[int]) -> None:
        """Forget adapters that no further step has; safe on any thread."""
        for number in numbers:
            self._adapters.pop(number, None)  # none if it could not be read

    @torch.inference_mode()
    def run(self, rows: RowArrays, kept: NDArray[np.int64], adapters: Sequence[int] = ()) -> None:
        """Compute this rank's part of a step. Its KV is in the pool when rank 0 is done with the step.

        Args:
            adapters: as for ``OtherRanks.begin``.
        """
        of_row = [self._adapters[number] if number else None for number in adapters]
        added = StepAdapters(of_row, rows.num_new, kept, self._device) if of_row else None
        batch = make_batch(rows, self._device)
        tokens = torch.empty(batch.num_tokens, dtype=torch.int64, device=self._device)
        keep = to_device(kept, self._device)
        self._model.hidden_states(tokens, batch.positions, self._attention.prepare(batch), keep, adapters=added)
