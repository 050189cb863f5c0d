"""Has the nodes of a model load and unload LoRA adapters, and nodes that come later too.

An adapter that is unloaded gets no new requests at once. The nodes are told when the requests of this gateway that have
it have ended, so that none of them fails.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from common.errors import ErrorCode, RequestError
from common.wire.messages import Adapter, Adapters, LoadAdapter, Message, UnloadAdapter
from gateway.requests.dispatcher import Dispatcher
from gateway.workers.pool import WorkerPool
from gateway.workers.registry import Worker
from gateway.workers.rpc import NodeRpc

log = logging.getLogger(__name__)

POLL_S = 0.02
#: Each node with its error, which is empty if the node has done what it was asked for.
NodeErrors = list[tuple[Worker, str]]


class AdapterChanges:
    """Args:
    send: sends to one node.
    """

    def __init__(self, rpc: NodeRpc, send: Callable[[Message, str], None], dispatcher: Dispatcher) -> None:
        self._rpc = rpc
        self._send = send
        self._dispatcher = dispatcher
        self._wanted: dict[tuple[str, str], str | None] = {}  # by model and name: the path, or None once unloaded

    async def load(self, pool: WorkerPool, name: str, path: str, timeout_s: float) -> NodeErrors:
        """Load an adapter at all nodes of a model.

        Raises RequestError: the adapter is being unloaded.
        """
        if name in pool.registry.withdrawn and not self._is_gone(pool, name):
            message = (
                f"lora_name: the adapter {name} is being unloaded; load it when the last request with it has ended"
            )
            raise RequestError(ErrorCode.INVALID_REQUEST, message, param="lora_name")
        pool.registry.set_withdrawn(name, is_withdrawn=False)
        errors = await self._ask_all(pool, LoadAdapter(name, path), timeout_s)
        if any(not error for _, error in errors):
            self._wanted[pool.model, name] = path
        return errors

    async def unload(self, pool: WorkerPool, name: str, timeout_s: float) -> NodeErrors:
        """Unload an adapter at all nodes of a model, once no request in flight has it.

        Raises RequestError: requests still have it after ``timeout_s``. It gets no new ones, and can be unloaded again.
        """
        registry = pool.registry
        registry.set_withdrawn(name, is_withdrawn=True)
        until = asyncio.get_running_loop().time() + timeout_s
        while num_left := self._num_with(pool, name):
            if asyncio.get_running_loop().time() >= until:
                message = f"{num_left} requests still have the adapter {name}, which takes no new ones; ask again later"
                raise RequestError(ErrorCode.DEADLINE_EXCEEDED, message)
            await asyncio.sleep(POLL_S)
        self._wanted[pool.model, name] = None
        errors = await self._ask_all(pool, UnloadAdapter(name), timeout_s)
        if not any(error for _, error in errors):
            registry.set_withdrawn(name, is_withdrawn=False)
        return errors

    def _is_gone(self, pool: WorkerPool, name: str) -> bool:
        """Whether no node takes requests for an adapter, and none is in flight."""
        is_held = any(name in node.adapters for node in pool.registry.workers.values())
        return not is_held and not self._num_with(pool, name)

    def _num_with(self, pool: WorkerPool, name: str) -> int:
        requests = (stream.request for stream in self._dispatcher.streams())
        return sum(one.model == pool.model and one.adapter.startswith(f"{name}@") for one in requests)

    async def _ask_all(self, pool: WorkerPool, message: LoadAdapter | UnloadAdapter, timeout_s: float) -> NodeErrors:
        nodes = list(pool.registry.workers.values())
        answers = await self._rpc.call([node.incarnation for node in nodes], message, Adapters, timeout_s)
        if nodes and not answers:
            asked = "loaded" if isinstance(message, LoadAdapter) else "dropped"
            text = f"no node has {asked} the adapter {message.name} within {timeout_s:g} s; ask again later"
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, text)
        late = f"the node did not answer within {timeout_s:g} s"
        found: NodeErrors = []
        for node in nodes:
            answer = answers.get(node.incarnation)
            found.append((node, late if answer is None else answer.error))
        return found

    def changed(self, pool: WorkerPool, node: Worker, adapters: Sequence[Adapter]) -> None:
        """A node says which adapters it has now; another gateway may have asked it to load or unload one."""
        names = {adapter.name for adapter in adapters}
        for name in node.adapters.keys() - names:
            if (pool.model, name) in self._wanted:
                self._wanted[pool.model, name] = None
        for name in names - node.adapters.keys():
            if self._wanted.get((pool.model, name), "") is None:
                del self._wanted[pool.model, name]
            if name in pool.registry.withdrawn and self._is_gone(pool, name):  # another gateway loads it again
                pool.registry.set_withdrawn(name, is_withdrawn=False)
        pool.registry.set_adapters(node.incarnation, tuple(adapters))

    def registered(self, pool: WorkerPool, node: Worker) -> None:
        """A node has come: have it load and unload what the others have."""
        for (model, name), path in self._wanted.items():
            if model != pool.model:
                continue
            if path is not None and name not in node.adapters:
                self._send(LoadAdapter(name, path), node.incarnation)
            elif path is None and name in node.adapters:
                self._send(UnloadAdapter(name), node.incarnation)
