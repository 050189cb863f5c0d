"""Where a running request moves to when its decode node drains."""

from dataclasses import dataclass

from gateway.workers.routing.router import Router, WorkerPair


@dataclass(frozen=True)
class Node:
    incarnation: str
    capacity_tokens: int = 1_000
    max_running: int = 2
    failed_peers: frozenset[str] = frozenset()
    revision: str = "w1"
    most_held_tokens: int = 0
    step_s: float = 0.0
    prompt_token_s: float = 0.0
    send_token_s: float = 0.0

    @property
    def longest_tokens(self) -> int:
        return self.capacity_tokens


SOURCE = Node("source")


def test_the_emptiest_other_node_is_chosen_and_counted_at_once() -> None:
    router, nodes = Router(), [SOURCE, Node("a"), Node("b", capacity_tokens=2_000)]
    first = router.choose_target(SOURCE, nodes, num_tokens=100, num_new=50)
    assert first == WorkerPair("source", "a", 0, 150)
    second = router.choose_target(SOURCE, nodes, num_tokens=100, num_new=50)
    assert second == WorkerPair("source", "b", 0, 150)
    assert (router.load("a"), router.load("b"), router.load("source")) == (150, 150, 0)
    third = router.choose_target(SOURCE, nodes, num_tokens=100, num_new=50)
    assert third is not None and third.decode == "b", "150 tokens are a smaller share of its pool"


def test_a_prediction_counts_instead_of_the_most_tokens() -> None:
    router = Router()
    pair = router.choose_target(SOURCE, [Node("a")], num_tokens=100, num_new=50, num_expected=20)
    assert pair is not None and pair.num_hold == 120


def test_a_node_that_is_full_or_too_small_or_out_of_reach_is_no_target() -> None:
    router = Router()
    nodes = [
        Node("small", capacity_tokens=149),
        Node("cut off", failed_peers=frozenset({"source"})),
        Node("new weights", revision="w2"),
    ]
    assert router.choose_target(SOURCE, [SOURCE, *nodes], num_tokens=100, num_new=50) is None
    able = Node("able")
    for _ in range(able.max_running):
        assert router.choose_target(SOURCE, [*nodes, able], num_tokens=100, num_new=50) is not None
    assert router.choose_target(SOURCE, [*nodes, able], num_tokens=100, num_new=50) is None
    router.decode_done(WorkerPair("source", "able", 0, 150))
    assert router.choose_target(SOURCE, [*nodes, able], num_tokens=100, num_new=50) is not None
