"""``GET /health`` of one node: whether its event loop turns and its engine finishes steps.

A node without a gateway is healthy, since a restart would not help; ``waits_for`` names the gateway then.
"""

import time
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from common.clock import Clock
from common.config.node import NodeConfig
from common.node.engine_thread import EngineThread
from common.node.event_loop import EventLoop
from common.node.monitoring.http_server import Answer


@dataclass(frozen=True, slots=True)
class Health:
    """The body of the answer.

    Attributes:
        status: ``ok`` or ``stalled``.
        problem: why it is stalled; empty if it is not.
        waits_for: what a node that is not registered waits for; empty if it is.
        turn_s, step_s: seconds for which the present turn of the event loop and the present step have taken.
    """

    status: str
    problem: str
    name: str
    role: str
    model: str
    is_registered: bool
    waits_for: str
    turn_s: float
    step_s: float


def stall(turn_s: float, step_s: float, timeout_s: float) -> str:
    """Why the node makes no progress, as a sentence; empty if it does."""
    if turn_s > timeout_s:
        return f"the event loop has not turned for {turn_s:.1f} s (--health-timeout {timeout_s:g})"
    if step_s > timeout_s:
        return f"the engine has computed one step for {step_s:.1f} s (--health-timeout {timeout_s:g})"
    return ""


class HealthCheck:
    """Answers ``GET /health``; safe on any thread.

    Args:
        clock: of the event loop.
    """

    def __init__(self, config: NodeConfig, loop: EventLoop, engine: EngineThread, clock: Clock) -> None:
        self._config = config
        self._loop = loop
        self._engine = engine
        self._clock = clock

    def answer(self) -> Answer:
        health = self.look()
        status = HTTPStatus.SERVICE_UNAVAILABLE if health.problem else HTTPStatus.OK
        return Answer(status, "application/json", msgspec.json.encode(health))

    def look(self) -> Health:
        config, loop = self._config, self._loop
        begun_at = self._engine.begun_at
        turn_s = max(0.0, self._clock.now() - loop.turned_at)
        step_s = 0.0 if begun_at is None else time.monotonic() - begun_at
        problem = stall(turn_s, step_s, config.health_timeout)
        return Health(
            status="stalled" if problem else "ok",
            problem=problem,
            name=config.node_name,
            role=config.role,
            model=config.served_name,
            is_registered=loop.is_registered,
            waits_for=loop.waits_for,
            turn_s=round(turn_s, 3),
            step_s=round(step_s, 3),
        )
