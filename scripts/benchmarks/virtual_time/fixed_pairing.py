"""Routers that choose nodes by a fixed rule, and a simulated service with one of them; for ``bench placement``."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gateway.workers.pool import WorkerPool
from gateway.workers.routing.candidates import Rows
from gateway.workers.routing.router import Router
from scripts.simulator.config import SimulateConfig


class InTurn(Router):
    """Each node gets every n-th request."""

    def _cheapest_prefill(self, rows: Rows, needs: Any) -> int:
        return int(rows[self._least(rows, np.zeros(len(rows)))])

    def _cheapest_decode(self, rows: Rows, needs: Any) -> int:
        return self._least(rows, np.zeros(len(rows)))


class LeastLoad(Router):
    """The nodes with the fewest tokens to compute and to hold, whatever they have cached."""

    def _cheapest_prefill(self, rows: Rows, needs: Any) -> int:
        return int(rows[self._least(rows, self._arrays.load[rows])])

    def _cheapest_decode(self, rows: Rows, needs: Any) -> int:
        return self._least(rows, self._arrays.load[rows] / self._arrays.capacity[rows])


class LongestPrefix(LeastLoad):
    """The prefill node that has most of the prompt cached, of several the one with the least load."""

    def _cheapest_prefill(self, rows: Rows, needs: Any) -> int:
        load = self._arrays.load[rows]
        return int(rows[self._least(rows, needs.all_lacking(rows) + load / (1.0 + load.sum()))])


class LeastLoadWithAffinity(Router):
    """The nodes with the fewest tokens, those of the prompt that they lack included. Production begins with it."""


class ByCost(Router):
    """The choice of production, with what a token takes by the heartbeats, which other routers do without here."""

    @property
    def uses_costs(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class PairedConfig(SimulateConfig):
    """A simulated service whose gateway has another router."""

    router: type[Router] = Router

    def pool(self, model: str) -> WorkerPool:
        router = self.router(
            local_prefill=self.local_prefill,
            local_threshold=self.local_prefill_threshold,
            max_dispatch_ahead=self.max_dispatch_ahead,
        )
        return replace(super().pool(model), router=router)
