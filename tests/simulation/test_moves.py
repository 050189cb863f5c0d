"""Random histories in which requests also move from decode node to decode node, with faults: exact tokens or a typed
error, and all pages returned on every node."""

import pytest
from simulation.test_histories import History
from support.cluster.local_cluster import Member

from common.errors import ErrorCode


class HistoryWithMoves(History):
    """A history whose requests move now and then. One that cannot move is continued on another pair.

    In most, they move away from one node only, as the gateway has it: a node that drains never gets requests. Requests
    that move in both directions may wait for each other: one of them is refused.
    """

    def __init__(self, seed: int, num_outstanding: int = 1) -> None:
        super().__init__(seed, num_outstanding)
        self.draining = self.random.choice([0, 1, 0, 1, None])
        if self.draining is None:
            self.is_faulty = True
            self.may_fail |= {ErrorCode.TRANSFER_FAILED, ErrorCode.QUEUE_FULL}

    def step(self) -> None:
        super().step()
        for _ in range(self.random.choice([0, 1, 1, 3])):
            self.move()
        self._continue_refused()

    def move(self) -> None:
        """Ask for a move at any moment, also of requests that are received, computed, retracted or moving."""
        cluster, random = self.cluster, self.random
        able = [
            rid
            for rid, answer in cluster.answers.items()
            if not answer.is_over and answer.target is None and answer.nodes[-1] in self._sources()
        ]
        if able:
            rid = random.choice(able)
            others = [at for at, node in enumerate(cluster.decode) if node is not cluster.answers[rid].nodes[-1]]
            cluster.move(rid, random.choice(others))

    def _sources(self) -> list[Member]:
        nodes = self.cluster.decode
        return nodes if self.draining is None else [nodes[self.draining]]

    def _continue_refused(self) -> bool:
        """Continue the requests that could not move; False if there are none."""
        answers = self.cluster.answers.items()
        refused = [rid for rid, one in answers if one.error and one.error.code is ErrorCode.SHUTTING_DOWN]
        for rid in refused:
            self.cluster.answers[rid].error = None
            self.cluster.continue_request(rid, pair=(self.random.choice([0, 1, None]), self.random.randint(0, 1)))
        return bool(refused)

    def fault(self) -> None:
        if self.can_break and self.random.random() < 0.3:
            self.cluster.cut(*self.cluster.decode)
            self.is_faulty = True
            self.may_fail |= {ErrorCode.NODE_LOST, ErrorCode.TRANSFER_FAILED}
        else:
            super().fault()

    def run(self, num_events: int = 45) -> None:
        super().run(num_events)
        while self._continue_refused():
            self.cluster.finish(may_wait=self.is_faulty or bool(self.cluster.wire.faults))


def live(seed: int) -> HistoryWithMoves:
    history = HistoryWithMoves(seed, 1 + seed % 2)
    history.run()
    history.judge()
    return history


@pytest.mark.slow(sample=0.12)
@pytest.mark.parametrize("seed", range(40))
def test_random_histories_with_moves_end_in_exact_tokens_or_an_error_and_return_all_pages(seed: int) -> None:
    live(seed)


@pytest.mark.slow
def test_many_more_histories_with_moves() -> None:
    for seed in range(1_000, 1_100):
        try:
            live(seed)
        except AssertionError as error:
            raise AssertionError(f"history {seed}") from error
