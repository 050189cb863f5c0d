"""Nodes as the router sees them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    incarnation: str
    capacity_tokens: int
    max_running: int = 100
    failed_peers: frozenset[str] = frozenset()
    revision: str = "w1"
    step_s: float = 0.0
    prompt_token_s: float = 0.0
    send_token_s: float = 0.0
    most_held_tokens: int = 0
    longest: int = 0  # 0: as many tokens as the pool has

    @property
    def longest_tokens(self) -> int:
        return self.longest or self.capacity_tokens


P1, P2 = Candidate("p1", 10_000), Candidate("p2", 10_000)
D1, D2 = Candidate("d1", 10_000), Candidate("d2", 10_000)
