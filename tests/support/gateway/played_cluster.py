"""A dispatcher whose nodes are played by a test: they are lost, fail and answer when the test says so.

Token i of a prompt is ``(sum of the prompt + 7 * i) % 250``, on every node.
"""

import math

from support.cluster.manual_clock import ManualClock
from support.gateway.fake_nodes import make_register, prompt_logprobs_of

from common.config.gateway import GatewayConfig
from common.sampling_params import SamplingParams
from common.wire.messages import Abort, Failed, Generate, Tokens
from common.wire.packed_logprobs import pack_logprobs
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPools, make_pool


def token_of(prompt, i):
    return (sum(prompt) + 7 * i) % 250


class Text:
    def push(self, tokens):
        return "".join(map(chr, tokens))

    def flush(self):
        return ""


class Call:
    """A call that is due later."""

    def __init__(self, due_at, act, argument):
        self.due_at, self.act, self.argument = due_at, act, argument
        self.is_cancelled = False

    def cancel(self):
        self.is_cancelled = True


class PlayedCluster:
    """A dispatcher, and nodes that answer when the test tells them to.

    Attributes:
        work: ``Generate`` messages at each living node, in order of arrival.
    """

    def __init__(self, *, prefills=2, decodes=2, **options):
        config = GatewayConfig(**{"model": "tiny", **options})
        self.pool = make_pool(config, "tiny", 300)
        self.clock = ManualClock(1.0)
        self.calls, self.soon, self.ended = [], [], []
        self.work, self.sent, self.names = {}, [], {}
        self.num_starts = 0
        self.dispatcher = Dispatcher(WorkerPools([self.pool]), self, self, self.clock, on_end=self.ended.append)
        for role, count in (("prefill", prefills), ("decode", decodes)):
            for i in range(count):
                self.start(role, f"{role}-{i}")

    # ---- for the dispatcher ----

    def send(self, message, *incarnations):
        for incarnation in incarnations:
            self.sent.append((message, incarnation))
            for sample in message.samples() if isinstance(message, Generate) else ():
                assert incarnation in self.work, "a request was sent to a lost node"
                self.work[incarnation].append(sample)
            if isinstance(message, Abort) and incarnation in self.work:
                kept = [
                    one for one in self.work[incarnation] if (one.rid, one.attempt) != (message.rid, message.attempt)
                ]
                self.work[incarnation] = kept

    def call_later(self, delay_s, act, rid):
        self.calls.append(Call(self.clock.now() + delay_s, act, rid))
        return self.calls[-1]

    def call_soon(self, act):
        self.soon.append(act)

    # ---- for tests ----

    def start(self, role, name, **fields):
        self.num_starts += 1
        incarnation = f"{name}-{self.num_starts:06}".ljust(32, "x")
        self.names[incarnation] = name
        self.work[incarnation] = []
        self.pool.registry.register(incarnation, make_register(role, name, **fields), self.clock.now())
        self.dispatcher.on_workers_added(self.pool)
        self.turn()
        return incarnation

    def lose(self, incarnation, *, is_empty=False, alive_until=math.inf):
        """As ``gateway.workers.control_plane.ControlPlane.lose``."""
        del self.work[incarnation]
        self.pool.registry.remove(incarnation)
        self.pool.router.remove_worker(incarnation)
        name = self.names[incarnation]
        self.dispatcher.on_worker_lost(incarnation, name, is_empty=is_empty, alive_until=alive_until)
        self.turn()

    def turn(self):
        while self.soon:
            due, self.soon = self.soon, []
            for act in due:
                act()

    def wait(self, seconds):
        self.clock.advance(seconds)
        due = [call for call in self.calls if call.due_at <= self.clock.now()]
        self.calls = [call for call in self.calls if call not in due]
        for call in due:
            if not call.is_cancelled:
                call.act(call.argument)
        self.dispatcher.tick(self.clock.now())
        self.turn()

    def come(self, *rids, prompt=(1, 2, 3), max_new=20, prompt_logprobs_from=None, timeout_s=1e9, **fields):
        sampling = SamplingParams(max_new_tokens=max_new, prompt_logprobs_from=prompt_logprobs_from)
        streams = [
            OutputStream(
                GenerateRequest(rid, rid, prompt, sampling, "tiny", timeout_s=timeout_s, **fields),
                0,
                Text,
                lambda s: None,
                self.clock.now(),
            )
            for rid in rids
        ]
        self.dispatcher.dispatch(streams)
        self.turn()
        return streams if len(streams) > 1 else streams[0]

    def node_of(self, role, rid):
        """The living node of a role that works on a request; the one that was told last."""
        return [one for one in self.work if self.names[one].startswith(role) and self.generate(one, rid)][-1]

    def generate(self, node, rid):
        return next((one for one in self.work[node] if one.rid == rid), None)

    def prefill(self, rid):
        """The prefill node is done: it sends the first token, unless the output has begun."""
        node = self.node_of("prefill", rid)
        message = self.generate(node, rid)
        self.work[node].remove(message)
        if not message.output:
            self.say(node, message, 0)

    def decode(self, rid, num_tokens=1):
        """The decode node sends the next tokens."""
        node = self.node_of("decode", rid)
        message = self.generate(node, rid)
        start = max(len(self.stream(rid).ids), 1)
        for i in range(start, min(start + num_tokens, message.sampling.max_new_tokens)):
            self.say(node, message, i)

    def finish(self, rid):
        self.prefill(rid)
        self.decode(rid, 100)

    def say(self, node, message, i):
        is_last = i == message.sampling.max_new_tokens - 1
        tokens = Tokens(
            message.rid,
            message.attempt,
            i,
            (token_of(message.prompt, i),),
            finish="length" if is_last else "",
            cached_tokens=0 if i else len(message.output) + 1,
            prompt_logprobs=() if i else tuple(map(pack_logprobs, prompt_logprobs_of(message))),
        )
        self.dispatcher.on_tokens(node, tokens)
        self.turn()

    def fail(self, node, rid, code):
        message = self.generate(node, rid)
        self.work[node].remove(message)
        self.dispatcher.on_failed(node, Failed(rid, message.attempt, code, f"failed by {self.names[node]}"))
        self.turn()

    def stream(self, rid):
        return next(stream for stream in self.dispatcher.streams() if stream.request.rid == rid)

    def check_idle(self):
        """Nothing is counted any more: at the router, in the queue, or for admission."""
        assert not self.dispatcher.num_in_flight
        assert not len(self.pool.queue)
        assert self.pool.admission.num_in_flight == 0
        for incarnation in self.work:
            assert self.pool.router.load(incarnation) == 0, incarnation
            assert self.pool.router.num_requests(incarnation) == 0
            assert not self.pool.registry.workers[incarnation].is_reserved


def output_of(stream):
    request = stream.request
    return [token_of(request.prompt, i) for i in range(request.sampling.max_new_tokens)]
