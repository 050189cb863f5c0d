"""Decides by measured load when a node should change its role (``--auto-roles``). Pure.

A role is *short* if its nodes are full: prefill nodes that compute nearly all the time and have seconds of prompts
before them, or decode nodes whose slots or pages are nearly all taken by requests that are decoded. A role has a node
to *spare* if those that remain would be well below that. A node changes only if one role is short and the other has a
node to spare, over a whole window of time.

Three rules prevent that nodes change back and forth. The role that gives a node is below ``SPARE_SHARE`` afterwards,
far from short. Every change begins a new window, since no measurement from before it counts. And the opposite change
waits for ``REVERSAL_S``. Besides, the changes of an hour are bounded.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.config.shared import Role
from gateway.workers.registry import Worker
from gateway.workers.routing.router import Router

HOUR_S = 3_600.0
#: The time over which load is averaged; a decision needs a whole window with the same nodes in the same roles.
WINDOW_S = 15.0
#: The share of its nodes' capacity from which on a role is short, and that it has at most after it has given a node.
SHORT_SHARE, SPARE_SHARE = 0.9, 0.7
#: Prefill nodes are short only if prompts wait at least this long: a busy node without a queue delays no request.
BACKLOG_S = 1.0
#: Gauges of a decode node that count requests whose prompts have not arrived.
ARRIVING = ("transfers_by_waiting_for_connection_by_", "transfers_by_receiving_by_")
#: The shortest time from a change to one in the opposite direction.
REVERSAL_S = 300.0


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """The load of one node at one instant.

    Attributes:
        at: the instant of its last heartbeat.
        is_fixed: it cannot change its role, or is the last node of its role and revision.
        busy_s: seconds that its engine has computed since its start.
        computed_tokens: prompt tokens that it has computed since its start.
        waiting_tokens: prompt tokens that it still has to compute.
        held_share: of a decode node, the share of its slots or pages that requests hold whose prompts have arrived.
        num_requests: requests of the node, in any state.
    """

    incarnation: str
    role: Role
    at: float
    is_fixed: bool
    busy_s: float
    computed_tokens: float
    waiting_tokens: float
    held_share: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """A node that should change to ``role``, and why."""

    incarnation: str
    role: Role
    reason: str


class AutoRoles:
    """The decisions for the nodes of one model.

    Args:
        max_per_hour: changes within any hour.
    """

    def __init__(self, max_per_hour: int) -> None:
        self._max_per_hour = max_per_hour
        self._window: deque[tuple[float, Sequence[NodeLoad]]] = deque()
        self._changes: deque[tuple[float, Role]] = deque()  # of the last hour, or the last one

    def decide(self, loads: Sequence[NodeLoad], now: float) -> RoleDecision | None:
        """Take in the load of all nodes that stay, and return a change that should begin now.

        Called about once a second.
        """
        window = self._window
        if window and _members(window[-1][1]) != _members(loads):
            window.clear()
        window.append((now, tuple(loads)))
        while len(window) > 2 and now - window[1][0] >= WINDOW_S:
            window.popleft()
        if now - window[0][0] < WINDOW_S:
            return None
        decision = self._decision(now)
        if decision is not None:
            window.clear()
            self._changes.append((now, decision.role))
        return decision

    def _decision(self, now: float) -> RoleDecision | None:
        loads = self._window[-1][1]
        prefills = [load for load in loads if load.role == "prefill"]
        decodes = [load for load in loads if load.role == "decode"]
        if not prefills or not decodes:
            return None
        busy, backlog_s, held = self._busy_share(), self._backlog_s(), self._held_share()
        if busy >= SHORT_SHARE and backlog_s >= BACKLOG_S and _has_spare(held, len(decodes)):
            role: Role = "prefill"
            givers = decodes
            reason = f"{backlog_s:.1f} s of prompts wait, prefill nodes {busy:.0%} busy, decode nodes {held:.0%} full"
        elif held >= SHORT_SHARE and _has_spare(busy, len(prefills)):
            role = "decode"
            givers = prefills
            reason = f"decode nodes are {held:.0%} full, prefill nodes {busy:.0%} busy"
        else:
            return None
        able = [load for load in givers if not load.is_fixed]
        if not able or not self._may_change(role, now):
            return None
        idlest = min(able, key=lambda load: (load.num_requests, load.waiting_tokens))
        return RoleDecision(idlest.incarnation, role, reason)

    def _may_change(self, role: Role, now: float) -> bool:
        changes = self._changes
        while len(changes) > 1 and now - changes[0][0] >= HOUR_S:
            changes.popleft()
        num_recent = sum(now - at < HOUR_S for at, _ in changes)
        is_reversal = bool(changes) and changes[-1][1] != role and now - changes[-1][0] < REVERSAL_S
        return num_recent < self._max_per_hour and not is_reversal

    def _of_prefills(self) -> list[tuple[NodeLoad, NodeLoad]]:
        """Each prefill node at the beginning and at the end of the window."""
        (_, first), (_, last) = self._window[0], self._window[-1]
        return [pair for pair in zip(first, last, strict=True) if pair[1].role == "prefill"]

    def _busy_share(self) -> float:
        """The share of the window in which the prefill nodes have computed, on average."""
        pairs = self._of_prefills()
        shares = [(last.busy_s - first.busy_s) / (last.at - first.at) for first, last in pairs if last.at > first.at]
        return sum(min(share, 1.0) for share in shares) / len(pairs)

    def _backlog_s(self) -> float:
        """How long the prefill nodes would compute the prompts that have waited in the window, on average."""
        pairs = self._of_prefills()
        tokens = sum(last.computed_tokens - first.computed_tokens for first, last in pairs)
        seconds = sum(last.busy_s - first.busy_s for first, last in pairs)
        waiting = [load.waiting_tokens for _, loads in self._window for load in loads if load.role == "prefill"]
        return sum(waiting) / len(waiting) * seconds / max(tokens, 1.0)

    def _held_share(self) -> float:
        """The share of the decode nodes' capacity that was taken in the window, on average."""
        shares = [load.held_share for _, loads in self._window for load in loads if load.role == "decode"]
        return sum(shares) / len(shares)


def load_of(node: Worker, router: Router, *, is_last: bool = False) -> NodeLoad:
    """The load of a node, as its last heartbeat and the router know it.

    Args:
        is_last: no other node has its role and its revision.
    """
    register, beat = node.register, node.heartbeat
    gauges, counters = ({}, {}) if beat is None else (beat.gauges, beat.counters)
    num_requests = 0 if beat is None else beat.num_running + beat.num_waiting
    held_share = 0.0
    if beat is not None and register.role == "decode":
        num_arriving = sum(number for name, number in gauges.items() if name.startswith(ARRIVING))
        unused = beat.num_free_pages + gauges.get("evictable_pages", 0.0) + gauges.get("granted_pages", 0.0)
        held_share = max((beat.num_running - num_arriving) / register.max_running, 1.0 - unused / register.num_pages)
    return NodeLoad(
        incarnation=node.incarnation,
        role=register.role,
        at=node.seen_at,
        is_fixed=is_last or bool(register.fixed_role),
        busy_s=counters.get("busy_seconds", 0.0),
        computed_tokens=counters.get("prompt_tokens_computed", 0.0),
        waiting_tokens=router.load(node.incarnation) if register.role == "prefill" else 0.0,
        held_share=held_share,
        num_requests=num_requests,
    )


def _members(loads: Sequence[NodeLoad]) -> list[tuple[str, Role]]:
    return [(load.incarnation, load.role) for load in loads]


def _has_spare(share: float, num_nodes: int) -> bool:
    """Whether a role can give one of its nodes, whose load the others take."""
    return num_nodes > 1 and share * num_nodes / (num_nodes - 1) < SPARE_SHARE
