"""How rank 0 has a step computed by the other ranks, and how they compute it.

Rank 0 has the executor: it alone knows requests, samples, and moves pages. In each step it sends the other ranks the
rows as integers, and then all ranks run their part of the model together. The other ranks hold no state of requests;
the ids of the tokens, of which some were sampled a step ago and never left the device, come to them by a broadcast.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.attention import make_attention
from common.engine.batch import RowArrays, make_batch
from common.engine.device_copies import to_device
from common.engine.kv_pool import KVPool
from common.engine.models.protocol import CausalModel
from common.engine.tensor_parallel.group import RankGroup


class OtherRanks(Protocol):
    """The other ranks of a node, as rank 0 sees them.

    Attributes:
        num_ranks: including rank 0.
    """

    num_ranks: int

    def join(self, pool: KVPool) -> RankGroup:
        """Have the other ranks make pools of the size of this one, which is that of rank 0, and form the group with
        them; they have loaded their weights by then.

        Raises:
            ConfigError: the group cannot be formed.
        """
        ...

    def begin(self, rows: RowArrays, kept: NDArray[np.int64]) -> None:
        """Have the other ranks compute a step.

        Args:
            kept: indices of the tokens whose hidden states are wanted, as for ``CausalModel.hidden_states``.
        Raises:
            RankLostError: one of them does not answer.
        """
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

    @torch.inference_mode()
    def run(self, rows: RowArrays, kept: NDArray[np.int64]) -> None:
        """Compute this rank's part of a step. Its KV is in the pool when rank 0 is done with the step."""
        batch = make_batch(rows, self._device)
        tokens = torch.empty(batch.num_tokens, dtype=torch.int64, device=self._device)
        keep = to_device(kept, self._device)
        self._model.hidden_states(tokens, batch.positions, self._attention.prepare(batch), keep)
