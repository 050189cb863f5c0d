"""Has the nodes of a model load and unload LoRA adapters, and nodes that come later too.

All that a gateway knows of changes comes from nodes: each tells every gateway of its adapters and of those that it has
unloaded, with the number of the change, and of two changes of a name the one with the higher number counts, or the
unload if two gateways have given one number at once. So a gateway that starts again knows what its nodes know, and a
node that comes back is told what it has missed.

An adapter that a node withdraws gets no new requests at any gateway. Each gateway tells the node when none of its own
requests has it any more, those included that wait or are tried again, so that no request fails.
"""

import time
from collections.abc import Callable, Collection, Iterable

from common.errors import ErrorCode, RequestError
from common.wire.messages import Adapters, AdapterUnused, LoadAdapter, Message, Register, UnloadAdapter
from gateway.requests.dispatcher import Dispatcher
from gateway.workers.pool import WorkerPool
from gateway.workers.registry import NO_CHANGE, LastChange, Worker
from gateway.workers.rpc import NodeRpc

#: Names of one model that are remembered as unloaded, beside those that a node still has.
MAX_UNLOADED = 1_024
#: Each node with its error, which is empty if the node has done what it was asked for.
NodeErrors = list[tuple[Worker, str]]
LATE, LOST = "the node did not answer in time", "the node was lost meanwhile"


class AdapterChanges:
    """Loads and unloads LoRA adapters on the nodes of a model.

    Args:
        send: sends to one node.
    """

    def __init__(self, rpc: NodeRpc, send: Callable[[Message, str], None], dispatcher: Dispatcher) -> None:
        self._rpc = rpc
        self._send = send
        self._dispatcher = dispatcher

    # ---- for the admin endpoints ------------------------------------------------------------------------------------

    async def load(self, pool: WorkerPool, name: str, path: str, timeout_s: float) -> NodeErrors:
        """Load an adapter at all nodes of a model.

        Raises RequestError: the adapter is being unloaded, or no node has answered in time.
        """
        adapters = (adapter for node in pool.registry.workers.values() for adapter in node.register.adapters)
        if any(adapter.name == name and adapter.is_withdrawn for adapter in adapters):
            message = (
                f"lora_name: the adapter {name} is being unloaded; load it when the last request with it has ended"
            )
            raise RequestError(ErrorCode.INVALID_REQUEST, message, param="lora_name")
        errors = await self._ask_all(pool, LoadAdapter(name, path, self._next_number(pool, name)), timeout_s)
        if not errors or any(error != LATE for _, error in errors):
            return errors
        text = f"no node has loaded the adapter {name} within {timeout_s:g} s; ask again later"
        raise RequestError(ErrorCode.DEADLINE_EXCEEDED, text)

    async def unload(self, pool: WorkerPool, name: str, timeout_s: float) -> NodeErrors:
        """Unload an adapter at all nodes of a model, once no request in flight at any gateway has it.

        Nodes that are lost before they have heard of it, or come later, are told when they register.

        Raises RequestError: requests still have it after ``timeout_s``. It gets no new ones, and goes with the last.
        """
        number = self._next_number(pool, name)
        pool.registry.set_last_change(name, LastChange(number, None))
        self._forget(pool)
        errors = await self._ask_all(pool, UnloadAdapter(name, number), timeout_s)
        if not any(error == LATE for _, error in errors):
            return errors
        ids = {node.adapters[name] for node in pool.registry.workers.values() if name in node.adapters}
        num_here = sum(self._dispatcher.num_with(pool.model, adapter) for adapter in ids)
        text = (
            f"requests still have the adapter {name} after {timeout_s:g} s, {num_here} of them at this gateway; it"
            " takes no new ones, and goes when the last one has ended"
        )
        raise RequestError(ErrorCode.DEADLINE_EXCEEDED, text)

    def _next_number(self, pool: WorkerPool, name: str) -> int:
        """The time in milliseconds, since another gateway may know of changes of which this one has not heard; a higher
        number if clocks differ.
        """
        return max(time.time_ns() // 1_000_000, pool.registry.last_changes.get(name, NO_CHANGE).number + 1)

    async def _ask_all(self, pool: WorkerPool, message: LoadAdapter | UnloadAdapter, timeout_s: float) -> NodeErrors:
        nodes = list(pool.registry.workers.values())
        answers = await self._rpc.call([node.incarnation for node in nodes], message, Adapters, timeout_s)
        came = [node for node in pool.registry.workers.values() if node not in nodes]
        self._update(pool, came, [message.name])
        found: NodeErrors = []
        for node in nodes:
            answer = answers.get(node.incarnation)
            missing = LATE if node.incarnation in pool.registry.workers else LOST
            found.append((node, missing if answer is None else answer.error))
        return found

    # ---- what nodes say ---------------------------------------------------------------------------------------------

    def changed(self, pool: WorkerPool, node: Worker, message: Adapters) -> None:
        """A node says which adapters it has now; another gateway may have asked for the change.

        It may have refused a change while it made this one, such as a load while requests still had the adapter.
        """
        before = set(node.register.adapters)
        pool.registry.set_adapters(node.incarnation, message.adapters, message.unloaded)
        names = {one.name for one in before ^ set(node.register.adapters)}
        nodes = [node]
        if self._learn(pool, node.register):
            nodes += pool.registry.with_replaced(names)  # they have refused to load another of this name
        self._update(pool, nodes, names)
        self._tell_unused(pool, node)

    def registered(self, pool: WorkerPool, node: Worker) -> None:
        """A node has come: have it make the changes that it has missed, or the others those that only it knows."""
        is_news = self._learn(pool, node.register)
        self._update(pool, pool.registry.workers.values() if is_news else [node])
        self._tell_unused(pool, node)

    def tick(self, pools: Iterable[WorkerPool]) -> None:
        """The last requests with an adapter may have ended. Called once a second."""
        for pool in pools:
            for node in pool.registry.workers.values():
                self._tell_unused(pool, node)

    def _learn(self, pool: WorkerPool, register: Register) -> bool:
        """Note the changes that a node knows; return whether one is news."""
        last_changes, is_news = pool.registry.last_changes, False
        for name, change in _changes(register).items():
            if change.rank > last_changes.get(name, NO_CHANGE).rank:
                pool.registry.set_last_change(name, change)
                is_news = True
        if is_news:
            self._forget(pool)
        return is_news

    @staticmethod
    def _forget(pool: WorkerPool) -> None:
        """Forget the oldest unloads of adapters that no node has, if there are too many."""
        held = {name for node in pool.registry.workers.values() for name in node.adapters}
        unloaded = [
            (last.number, name)
            for name, last in pool.registry.last_changes.items()
            if last.path is None and name not in held
        ]
        for _, name in sorted(unloaded)[: max(len(unloaded) - MAX_UNLOADED, 0)]:
            pool.registry.forget_last_change(name)

    def _update(self, pool: WorkerPool, nodes: Iterable[Worker], names: Collection[str] | None = None) -> None:
        """Have nodes make the changes that they have missed: of adapters of these names, or of all."""
        for node in nodes:
            known = _changes(node.register)
            held = {adapter.name: adapter for adapter in node.register.adapters}
            for name, last in pool.registry.last_changes.items():
                if (names is not None and name not in names) or known.get(name, NO_CHANGE).rank >= last.rank:
                    continue
                adapter = held.get(name)
                if last.path is None:
                    if adapter is not None:
                        self._send(UnloadAdapter(name, last.number), node.incarnation)
                elif adapter is None or adapter.id == last.adapter:
                    self._send(LoadAdapter(name, last.path, last.number), node.incarnation)
                elif not adapter.is_withdrawn:  # the node is asked to load the other one once this one has gone
                    self._send(UnloadAdapter(name, last.number - 1), node.incarnation)

    def _tell_unused(self, pool: WorkerPool, node: Worker) -> None:
        """Tell a node which of the adapters that it withdraws have no requests here. It may be told more than once."""
        for adapter in node.register.adapters:
            if adapter.is_withdrawn and not self._dispatcher.num_with(pool.model, adapter.id):
                self._send(AdapterUnused(adapter.id), node.incarnation)


def _changes(register: Register) -> dict[str, LastChange]:
    """The last changes that a node knows, by name."""
    known: dict[str, LastChange] = {}
    for one in register.adapters:
        known[one.name] = LastChange(one.change, None) if one.is_withdrawn else LastChange(one.change, one.path, one.id)
    return known | {name: LastChange(number, None) for name, number in register.unloaded.items()}
