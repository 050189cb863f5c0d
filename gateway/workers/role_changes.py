"""Changes of roles: asks a node to leave its role, and waits until it is back in the other one.

The node keeps its model and its cache. It comes back as another worker, with an incarnation of its own, so that nothing
that was meant for its last role reaches the next one.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from common.config.shared import Role
from common.errors import ErrorCode, RequestError
from common.wire.messages import ChangeRole, Done
from gateway.workers.auto_roles import RoleDecision, load_of
from gateway.workers.pool import WorkerPool, WorkerPools
from gateway.workers.registry import Worker
from gateway.workers.rpc import NodeRpc

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
#: How long the requests of a node may take that changes its role automatically.
AUTO_TIMEOUT_S = 120.0
#: Beyond the time that requests have: for the proof that no page is written any more, and for the registration.
RETURN_TIMEOUT_S = 30.0


class RoleChanges:
    """The changes in progress.

    Args:
        on_workers_added: called when a node that has kept its role takes requests again.
    """

    def __init__(self, pools: WorkerPools, rpc: NodeRpc, on_workers_added: Callable[[WorkerPool], None]) -> None:
        self._pools = pools
        self._rpc = rpc
        self._on_workers_added = on_workers_added
        self._tasks: set[asyncio.Task[None]] = set()  # of automatic changes
        self._waiting: dict[tuple[str, str], asyncio.Future[Worker | None]] = {}  # by model and name of the node

    async def change(self, node: Worker, role: Role, timeout_s: float, *, is_forced: bool = False) -> Worker:
        """Change the role of a node, and return it in its new role.

        Args:
            timeout_s: for the requests that the node has; those that are left then end there.
            is_forced: the last node of its role may change, too.

        Raises:
            RequestError: the node may not change its role, has not answered, or has not come back in time.
        """
        registry, key = self._pools[node.register.model].registry, (node.register.model, node.name)
        refusal = registry.role_refusal(node, role, is_forced=is_forced)
        if key in self._waiting:
            refusal = f"node {node.name} is changing its role already"
        if refusal:
            raise RequestError(ErrorCode.INVALID_REQUEST, refusal)
        wait = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            await self._ask(node, ChangeRole(role, timeout_s))
            back: Worker | None = await asyncio.wait_for(wait, timeout_s + RETURN_TIMEOUT_S)
        except TimeoutError:
            message = f"node {node.name} has not come back as a {role} node within {timeout_s + RETURN_TIMEOUT_S:g} s"
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, message) from None
        finally:
            del self._waiting[key]
            self._pools[node.register.model].router.remove_worker(_parked(node.incarnation))
        if back is None:
            message = f"node {node.name} drains and stops, and does not become a {role} node"
            raise RequestError(ErrorCode.INVALID_REQUEST, message)
        if back.register.role != role:
            message = f"node {node.name} is still a {back.register.role} node; its log says why"
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, message)
        return back

    async def _ask(self, node: Worker, order: ChangeRole) -> None:
        """Take the node out of rotation first, so that no request is sent to it after the order."""
        pool, is_accepted = self._pools[node.register.model], False
        pool.registry.begin_drain(node.incarnation)
        try:
            answers = await self._rpc.call([node.incarnation], order, Done, ANSWER_TIMEOUT_S)
            answer = answers.get(node.incarnation)
            if answer is None:
                message = f"node {node.name} did not answer within {ANSWER_TIMEOUT_S:g} s"
                raise RequestError(ErrorCode.DEADLINE_EXCEEDED, message)
            if answer.error:
                raise RequestError(ErrorCode.INVALID_REQUEST, answer.error)
            is_accepted = True
        finally:
            if not is_accepted:
                pool.registry.end_drain(node.incarnation)
                self._on_workers_added(pool)

    def tick(self, now: float) -> None:
        """Begin the changes that ``--auto-roles`` decides. Called once a second."""
        for pool in self._pools:
            if pool.auto_roles is None:
                continue
            staying = [node for node in pool.registry.workers.values() if not node.is_draining]
            counts = Counter((node.register.role, node.revision) for node in staying)
            loads = [
                load_of(node, pool.router, is_last=counts[node.register.role, node.revision] == 1) for node in staying
            ]
            decision = pool.auto_roles.decide(loads, now)
            if decision is not None:
                work = asyncio.create_task(self._carry_out(pool.registry.workers[decision.incarnation], decision))
                self._tasks.add(work)
                work.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Give up the automatic changes in progress."""
        for work in self._tasks:
            work.cancel()

    async def _carry_out(self, node: Worker, decision: RoleDecision) -> None:
        log.info("node %s becomes a %s node: %s", node.name, decision.role, decision.reason)
        try:
            await self.change(node, decision.role, AUTO_TIMEOUT_S)
        except RequestError as error:
            log.warning("the role of node %s has not changed: %s", node.name, error.message)

    def lost(self, node: Worker) -> None:
        """A node is gone. What it has cached is remembered while it changes its role."""
        if (node.register.model, node.name) in self._waiting:
            self._pools[node.register.model].router.rename_worker(node.incarnation, _parked(node.incarnation))

    def drained(self, node: Worker) -> None:
        """A node was told to stop, instead of what it was told before."""
        wait = self._waiting.get((node.register.model, node.name))
        if wait is not None and not wait.done():
            wait.set_result(None)

    def registered(self, node: Worker) -> None:
        """A node has registered, in whichever role. One that still drains has lost its connection meanwhile."""
        if node.register.previous:
            router = self._pools[node.register.model].router
            router.rename_worker(_parked(node.register.previous), node.incarnation)
        wait = self._waiting.get((node.register.model, node.name))
        if wait is not None and not (wait.done() or node.is_draining):
            wait.set_result(node)


def _parked(incarnation: str) -> str:
    """The name by which the router knows the cache of a node between two roles."""
    return f"parked {incarnation}"
