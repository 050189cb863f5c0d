"""The gateway in virtual time: the production registry, router, admission and dispatcher, without HTTP and text.

``Gateway`` does what ``gateway.workers.control_plane.ControlPlane`` does in the real gateway.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import field

from common.errors import RequestError
from common.wire.messages import Failed, Message, Moved, Register, Registered, Spans, Tokens
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.input.input_processor import check_length, max_output_tokens
from gateway.requests.output_processor import OutputStream, StageReport
from gateway.workers.pool import WorkerPool, WorkerPools
from scripts.simulator.event_queue import EventQueue, Timer
from scripts.simulator.service.repeated_steps import RepeatedSteps, TokenFeed

TICK_S = 1.0


class NoText:
    """A ``Detokenizer`` that produces no text."""

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


#: The fields that ``Answer`` replaces.
IDS: Any = OutputStream.ids
LAST_AT: Any = OutputStream.last_at


class Answer(OutputStream, eq=False):
    """A production stream that records when tokens arrive. Those of repeated steps are taken when it is looked at.

    Attributes:
        stamps_s: arrival of each message with tokens.
        extra: tokens beyond the first of a message, by its index in ``stamps_s``; messages with one token are left out.
    """

    stamps_s: list[float] = field(default_factory=list)
    extra: dict[int, int] = field(default_factory=dict)
    _feeds: list[TokenFeed] = field(default_factory=list)

    # mypy allows no property in place of a field; msgspec reads and writes fields by their place.
    @property  # type: ignore[misc]
    def ids(self) -> list[int]:
        if self._feeds:
            self._take()
        found: list[int] = IDS.__get__(self)
        return found

    @ids.setter
    def ids(self, ids: list[int]) -> None:
        IDS.__set__(self, ids)

    @property  # type: ignore[misc]
    def last_at(self) -> float:
        if self._feeds:
            self._take()
        found: float = LAST_AT.__get__(self)
        return found

    @last_at.setter
    def last_at(self, instant: float) -> None:
        LAST_AT.__set__(self, instant)

    @property
    def can_defer(self) -> bool:
        """Whether a further token, but for the last, only lengthens the output."""
        return not (self.is_ended or self._early) and self.num_attempts == 1 and bool(self.ids)

    def feed(self, feed: TokenFeed) -> None:
        self._feeds.append(feed)

    def _take(self) -> None:
        """Take the tokens that have arrived by now."""
        for feed in self._feeds:
            tokens, arrivals = feed.take()
            if tokens:
                IDS.__get__(self).extend(tokens)
                self.stamps_s += arrivals
                LAST_AT.__set__(self, arrivals[-1])
        self._feeds = [feed for feed in self._feeds if not feed.is_empty]

    def _end(self, now: float) -> None:
        self._take()
        feeds, self._feeds = self._feeds, []
        OutputStream._end(self, now)
        for feed in feeds:
            feed.end()

    def on_tokens(self, message: Tokens, now: float) -> None:
        ids = self.ids
        num_known = len(ids)
        if message.index == num_known > 0 and not (message.finish or self._early or self.ended_at):
            ids += message.tokens  # the common case of ``OutputStream.on_tokens``, without text
            self.last_at = now
        else:
            OutputStream.on_tokens(self, message, now)
        num_new = len(ids) - num_known
        if num_new:
            if num_new > 1:
                self.extra[len(self.stamps_s)] = num_new - 1
            self.stamps_s.append(now)


def _ignore(stream: OutputStream) -> None:
    """Nothing reads an answer before its end."""


class Gateway:
    def __init__(
        self, pool: WorkerPool, events: EventQueue, deliver: Callable[[str, Message], None],
        *, on_end: Callable[[Answer], None],
    ) -> None:  # fmt: skip
        self.pool = pool
        self.answers: dict[str, Answer] = {}  # in flight, by request id
        self._events = events
        self._deliver = deliver
        self._on_end = on_end
        self._is_ticking = False
        self.dispatcher = Dispatcher(WorkerPools([pool]), self, self, events, on_end=self._ended)

    # ---- clients ----------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> Answer:
        """Accept a request. Raises RequestError: it is refused."""
        if (limits := self.pool.registry.accepted) is None:
            raise self.pool.no_route()
        check_length(request.prompt, limits, "prompt")
        max_output_tokens(request.sampling.max_new_tokens, len(request.prompt), limits, 0, "max_tokens")
        if not self._is_ticking:
            self._is_ticking = True
            self._events.background_after(TICK_S, self._tick)
        answer = Answer(request, 0, NoText, _ignore, self._events.now())
        self.answers[request.rid] = answer
        try:
            self.dispatcher.dispatch([answer])
        except RequestError:
            self.answers.pop(request.rid, None)
            raise
        return answer

    def _on_feed_end(self, feed: TokenFeed) -> None:
        """A stream has ended before its tokens: those under way come as messages, which the dispatcher answers."""
        feed.steps.catch_up()
        for place, message in feed.untaken():
            self._events.at_place(place, self.on_messages, feed.steps.sender, (message,))

    def abort(self, rid: str) -> None:
        self.dispatcher.abort(rid)

    def _ended(self, stream: OutputStream) -> None:
        answer = self.answers.pop(stream.request.rid, None)
        if answer is not None:
            self._on_end(answer)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def defer_tokens(self, steps: RepeatedSteps) -> bool:
        """Let streams take their tokens from a repeated step, if each token concerns nothing but its stream."""
        answers = [self.answers.get(request.rid) for request in steps.rows]
        if self.pool.queue.order.is_charging or not all(answer and answer.can_defer for answer in answers):
            return False
        for row, answer in enumerate(answers):
            assert answer is not None
            answer.feed(TokenFeed(steps, row, self._events, self._on_feed_end))
        return True

    def register(self, incarnation: str, register: Register) -> None:
        answer = self.pool.registry.register(incarnation, register, self._events.now())
        assert isinstance(answer, Registered), answer
        self.dispatcher.on_workers_added(self.pool)

    def on_messages(self, sender: str, messages: Sequence[Message]) -> None:
        dispatcher = self.dispatcher
        for message in messages:
            if type(message) is Tokens:
                dispatcher.on_tokens(sender, message)
            elif isinstance(message, Failed):
                dispatcher.on_failed(sender, message)
            elif isinstance(message, Moved):
                dispatcher.on_moved(sender, message)
            elif isinstance(message, Spans):
                dispatcher.on_spans(sender, message, StageReport(sender, 0.0, 0.0, message.spans))

    def send(self, message: Message, *incarnations: str) -> None:
        """Send a message to nodes, even if one has died unnoticed."""
        for incarnation in incarnations:
            self._deliver(incarnation, message)

    def lose(self, incarnation: str, *, is_empty: bool = False, alive_until: float = math.inf) -> None:
        node = self.pool.registry.remove(incarnation)
        if node is not None:
            self.pool.router.remove_worker(incarnation)
            self.dispatcher.on_worker_lost(incarnation, node.name, is_empty=is_empty, alive_until=alive_until)

    def call_later(self, delay_s: float, act: Callable[[str], None], rid: str) -> Timer:
        return self._events.background_after(delay_s, act, rid)

    def call_soon(self, act: Callable[[], None]) -> None:
        self._events.after(0.0, act)

    def _tick(self) -> None:
        """Run the periodic work once a second while requests are in flight."""
        self._is_ticking = bool(self.answers)
        if self._is_ticking:
            self.dispatcher.tick(self._events.now())
            self._events.background_after(TICK_S, self._tick)
