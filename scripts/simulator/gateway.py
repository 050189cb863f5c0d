"""The gateway in virtual time: production registry, router, admission and table of requests; no HTTP, text or sockets.

It is to ``gateway.requests.dispatcher.Dispatch`` what ``gateway.workers.control_plane.Control`` is in a real gateway.
"""

from collections.abc import Callable, Sequence

from common.errors import RequestError
from common.wire.messages import Failed, Message, Register, Registered, Tokens
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.output_processor import GenerateRequest, OutputStream
from gateway.workers.pool import WorkerPool, WorkerPools
from scripts.simulator.event_queue import Agenda, Timer

TICK_S = 1.0


class NoText:
    """A ``Detokenizer`` for those who count tokens and read none."""

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


NO_TEXT = NoText()


def _nobody_reads(relay: OutputStream) -> None:
    pass


class Answer(OutputStream):
    """A production relay that notes when tokens come.

    Attributes:
        stamps_s: when each message with tokens came.
        extra: how many tokens beyond one a message brought, by its place in ``stamps_s``, where it was not one.
    """

    def __init__(
        self,
        ask: GenerateRequest,
        wake: Callable[[OutputStream], None],
        on_end: Callable[[OutputStream], None],
        started_at: float,
    ) -> None:
        OutputStream.__init__(self, ask, 0, NO_TEXT, wake, on_end, started_at)
        self.stamps_s: list[float] = []
        self.extra: dict[int, int] = {}

    def on_tokens(self, message: Tokens, now: float) -> None:
        ids = self.ids
        num_known = len(ids)
        if message.index == num_known > 0 and not (message.finish or self._early or self.ended_at):
            ids += message.tokens  # one more of many, and nobody reads it: what the relay would do, without the text
            self.last_at = now
            if message.timings:
                self.timings.update(message.timings)
        else:
            OutputStream.on_tokens(self, message, now)
        num_new = len(ids) - num_known
        if num_new:
            if num_new > 1:
                self.extra[len(self.stamps_s)] = num_new - 1
            self.stamps_s.append(now)


class Gateway:
    """Args:
    deliver: takes a message to a node.
    on_end: told of every answer that is over.
    """

    def __init__(
        self,
        fleet: WorkerPool,
        agenda: Agenda,
        deliver: Callable[[str, Message], None],
        *,
        on_end: Callable[[Answer], None],
    ) -> None:
        self.fleet = fleet
        self.answers: dict[str, Answer] = {}  # under way
        self._agenda = agenda
        self._deliver = deliver
        self._on_end = on_end
        self._is_ticking = False
        self.requests = Dispatcher(
            WorkerPools([fleet]), self, agenda, on_start=lambda relay, pair: None, on_end=lambda relay: None
        )

    # ---- clients ----------------------------------------------------------------------------------------------------

    def ask(self, ask: GenerateRequest) -> Answer:
        """Take one request in.

        Raises:
            RequestError: it is turned away.
        """
        if not self._is_ticking:
            self._is_ticking = True
            self._agenda.idle_after(TICK_S, self._tick)
        answer = self.answers[ask.rid] = Answer(ask, _nobody_reads, self._ended, self._agenda.now())
        try:
            self.requests.dispatch([answer])
        except RequestError:
            self.answers.pop(ask.rid, None)
            raise
        return answer

    def abort(self, rid: str) -> None:
        """The client has gone."""
        self.requests.abort(rid)

    def _ended(self, relay: OutputStream) -> None:
        self.requests.ended(relay)
        answer = self.answers.pop(relay.ask.rid, None)
        if answer is not None:
            self._on_end(answer)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def register(self, incarnation: str, register: Register) -> None:
        """A node introduces itself."""
        answer = self.fleet.registry.register(incarnation, register, self._agenda.now())
        assert isinstance(answer, Registered), answer
        self.requests.nodes_came(self.fleet)

    def hear(self, sender: str, messages: Sequence[Message]) -> None:
        """What a node says."""
        requests = self.requests
        for message in messages:
            if type(message) is Tokens:
                requests.on_tokens(sender, message)
            elif isinstance(message, Failed):
                requests.on_failed(sender, message)

    def send(self, message: Message, incarnation: str) -> bool:
        """To a node, which may have died without anybody's having noticed."""
        self._deliver(incarnation, message)
        return True

    def lose(self, incarnation: str) -> None:
        """A node is gone."""
        node = self.fleet.registry.remove(incarnation)
        if node is not None:
            self.fleet.router.forget(incarnation)
            self.requests.lost(incarnation, node.name)

    def call_later(self, delay_s: float, act: Callable[[str], None], rid: str) -> Timer:
        return self._agenda.idle_after(delay_s, act, rid)

    def call_soon(self, act: Callable[[], None]) -> None:
        self._agenda.after(0.0, act)

    def _tick(self) -> None:
        """Once a second, as long as there is something to look after."""
        self._is_ticking = bool(self.answers)
        if self._is_ticking:
            self.requests.tick(self._agenda.now())
            self._agenda.idle_after(TICK_S, self._tick)
