"""Answers of requests with a key: a retry takes the outputs over, and outputs without a client go on for a grace.

A retry that this gateway does not know may repeat a request of another gateway, or of an earlier start of this one. The
nodes are asked for its outputs so far, which are then continued like those of an attempt that a lost node has ended.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from common.clock import Clock
from common.wire.messages import KeptOutput
from gateway.http.protocol.native import NativeRequest
from gateway.http.streaming import OutputEvents
from gateway.metrics.collectors import Metrics
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.idempotency import IdempotencyStore, KeyedRequest, RequestIdentity
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream, are_in_vocabulary
from gateway.workers.control_plane import ControlPlane
from gateway.workers.served_models import ServedModel

log = logging.getLogger(__name__)

#: Nodes that do not say in time which requests they know are taken to know none. A node that has lost its core for
#: some time still answers; only while a node hangs do requests with a key wait so long.
FIND_TIMEOUT_S = 2.0


class Grace:
    """Stands for a client that has left, for some time: ``end`` is called if it comes back meanwhile.

    Args:
        abort: ends the outputs; called when the time is over, or once one of them has failed, since then none is kept.
    """

    def __init__(self, request: KeyedRequest, grace_s: float, abort: Callable[[KeyedRequest], None]) -> None:
        self._request = request
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(grace_s, abort, request)

    def wake(self, stream: OutputStream) -> None:
        if stream.error is not None and self._request.detach(self):
            self._timer.cancel()
            self._loop.call_soon(self._abort, self._request)  # the dispatcher is still ending this one

    def end(self) -> None:
        self._timer.cancel()


class Retries:
    """Gives requests that repeat an earlier one its outputs.

    Args:
        grace_s: how long outputs go on after their client has left, for it to come back.
    """

    def __init__(
        self, store: IdempotencyStore, dispatcher: Dispatcher, control: ControlPlane,
        *, metrics: Metrics, clock: Clock, grace_s: float,
    ) -> None:  # fmt: skip
        self._store = store
        self._control = control
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._grace_s = grace_s

    def attach(self, identity: RequestIdentity, events: OutputEvents) -> KeyedRequest | None:
        """Give the outputs of the request that this one repeats to a new answer; None if it repeats none.

        Raises RequestError: another request has the same key.
        """
        request = self._store.find(identity, self._clock.now())
        if request is not None:
            self._metrics.retried(request.streams[0].request.model, is_ended=request.is_ended)
            request.attach(events)
        return request

    async def take_over(self, model: ServedModel, requests: Sequence[GenerateRequest]) -> dict[str, KeptOutput]:
        """The outputs so far, by key, of requests that another gateway has sent to the nodes; they end there."""
        found: dict[str, KeptOutput] = {}
        workers = model.pool.registry.workers
        asked = dict(workers)  # some may have gone when the answers are here
        answers = await self._control.find(model.name, [request.key for request in requests], FIND_TIMEOUT_S)
        prompts = {request.key: request for request in requests}
        if len({node.revision for node in workers.values()}) > 1:
            return found  # the weights that made an output are not known
        for incarnation, outputs in answers.items():
            for output in outputs:
                request = prompts.get(output.key)
                best = found.get(output.key)
                if request is None or (best is not None and len(best.tokens) >= len(output.tokens)):
                    continue
                if not _can_be(output, request, asked[incarnation].register.vocab_size):
                    log.error("node %s has kept an output that it cannot have made", asked[incarnation].name)
                    continue
                if output.tokens and incarnation in workers:
                    model.pool.router.note_cached(request.prompt, request.salt, incarnation)
                found[output.key] = output
        return found

    def add(self, request: KeyedRequest, streams: list[OutputStream], events: OutputEvents) -> None:
        """Make a request known by its key, once its outputs are sent, and give them to its answer."""
        request.streams.extend(streams)
        self._store.add(request)
        request.attach(events)

    def leave(self, request: KeyedRequest, events: OutputEvents) -> None:
        """An answer is over. Outputs in flight go on for the grace, unless another answer has taken them over."""
        if not request.detach(events):
            return
        if request.has_failed or not self._grace_s:
            self._abort(request)
        elif not request.is_ended:
            events.resume()  # the client that they waited for has left
            request.reader = Grace(request, self._grace_s, self._abort)

    def _abort(self, request: KeyedRequest) -> None:
        """End the outputs that are still in flight."""
        for stream in request.streams:
            if not stream.is_ended:
                self._dispatcher.abort(stream.request.rid, "the client has disconnected")


def _can_be(output: KeptOutput, request: GenerateRequest, vocab_size: int) -> bool:
    """Whether a request may have this output so far."""
    num_left = request.sampling.max_new_tokens - len(output.tokens)
    return are_in_vocabulary(output.tokens, vocab_size) and num_left >= (0 if output.finish else 1)


def draws_seed(body: Any, request: GenerateRequest) -> bool:
    """Whether the client leaves the seed of a request to the gateway."""
    if not isinstance(body, NativeRequest):
        return getattr(body, "seed", None) is None
    params = body.sampling_params
    own = params[request.prompt_number] if isinstance(params, list) else params
    return own is None or (own.seed is None and own.sampling_seed is None)
