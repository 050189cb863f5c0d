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


P1, P2 = Candidate("p1", 10_000), Candidate("p2", 10_000)
D1, D2 = Candidate("d1", 10_000), Candidate("d2", 10_000)
