"""Records the events and plans of a role (``--record``), so that they can be replayed and examined.

The role and its transport are wrapped. Events, which are immutable, are handed to a thread that encodes and writes them
(``common.node.recording.format``). If the disk is too slow or fails, the recording ends with a line in the log, and
serving goes on.
"""

import contextlib
import dataclasses
import logging
import queue
import threading
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec

from common.config.node import NodeConfig
from common.config.options import options_of
from common.config.shared import SCHEDULING_VARIABLES
from common.errors import BatonError, ErrorCode
from common.node.recording import format as frames
from common.node.role import NodeRole
from common.step_plan import StepPlan, StepResult
from common.wire.messages import Message

log = logging.getLogger(__name__)

#: Frames that may wait to be written; one more ends the recording.
MAX_WAITING = 100_000
CLOSE_S = 5.0

#: Default results of a transport's methods, which are not written. Other methods return nothing that matters.
DEFAULT_RESULTS: dict[str, Any] = {
    "attach": None,
    "poll": [],
    "write": ...,
    "done": [],
    "detach": True,
    "late": [],
    "returns": [],
    "attach_beside": False,
    "is_changing": False,
    "offer": ...,
    "offer_beside": "",
    "chosen": True,
}


def plain_config(config: NodeConfig) -> dict[str, Any]:
    """The values of a configuration without its secrets; ``config_from`` reverses it.

    Without keys, a node may have addresses that other machines can reach only if it is insecure.
    """
    known = options_of(NodeConfig)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    shown = {name: value for name, value in values.items() if name not in known or not known[name].is_secret}
    shown["insecure"] = config.insecure or bool(config.keys)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()}


def config_from(values: Mapping[str, Any]) -> NodeConfig:
    """The configuration with these values. Raises TypeError for options that this program does not know."""
    found: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return NodeConfig(**found)


class Recorder:
    """Writes one recording.

    Args:
        path: of the new file; see ``open_new``.
    Attributes:
        path: of the file that was created.
    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: str) -> None:
        self._file, self.path = frames.open_new(path)
        self._waiting: queue.Queue[frames.Frame | None] = queue.Queue(MAX_WAITING)
        self._is_over = False
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()

    def note(self, frame: frames.Frame) -> None:
        """Add a frame; never blocks."""
        if self._is_over:
            return
        try:
            self._waiting.put_nowait(frame)
        except queue.Full:
            self._is_over = True
            log.error("recording into %s ends here: the disk is too slow", self.path)

    def close(self) -> None:
        """Write the frames that wait, for ``CLOSE_S`` at most, or twice that if the queue is full."""
        self._is_over = True
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
        self._thread.join(timeout=CLOSE_S)

    def _write(self) -> None:
        with contextlib.suppress(OSError), self._file:
            while (frame := self._waiting.get()) is not None:
                try:
                    frames.write_frame(self._file, frame)
                    if self._waiting.empty():
                        self._file.flush()
                except Exception as error:
                    self._is_over = True
                    is_foreseen = isinstance(error, OSError | BatonError | msgspec.EncodeError)
                    log.error("recording into %s ends here: %s", self.path, error, exc_info=not is_foreseen)
                    return


class RecordedTransports:
    """The ends of a node's transports, whose results are recorded."""

    def __init__(self, ends: Any, recorder: Recorder) -> None:
        self._ends = ends
        self._recorder = recorder

    @cached_property
    def reader(self) -> Any:
        return RecordedTransport(self._ends.reader, "reader", self._recorder)

    @cached_property
    def writer(self) -> Any:
        return RecordedTransport(self._ends.writer, "writer", self._recorder)


class RecordedTransport:
    """One end of a transport."""

    def __init__(self, transport: Any, end: Literal["reader", "writer"], recorder: Recorder) -> None:
        self._transport = transport
        self._end: Literal["reader", "writer"] = end
        self._recorder = recorder
        self._num_calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        if name not in DEFAULT_RESULTS:
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            number = self._num_calls[name]
            self._num_calls[name] += 1
            try:
                result = found(*arguments, **named)
            except BatonError as error:  # only attaching raises
                self._note(name, number, str(error))
                raise
            if result != DEFAULT_RESULTS[name]:
                self._note(name, number, result)
            return result

        self.__dict__[name] = call  # later look-ups find it directly
        return call

    def _note(self, name: str, number: int, result: Any) -> None:
        self._recorder.note(frames.TransportResult(self._end, name, number, msgspec.Raw(frames.encode(result))))


class RecordedRole:
    """A role whose events and plans are recorded, in their order."""

    def __init__(self, role: NodeRole, recorder: Recorder) -> None:
        self.outbox = role.outbox
        self.stats = role.stats
        self._role = role
        self._note = recorder.note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)  # queries

    def on_gateway(self, message: Message, now: float) -> None:
        self._note(frames.GatewayMessage(now, message))  # type: ignore[arg-type]  # a message that was decoded as one of these
        self._role.on_gateway(message, now)

    def on_peer(self, peer: str, message: Message, now: float) -> None:
        self._note(frames.PeerMessage(now, peer, message))  # type: ignore[arg-type]  # the same
        self._role.on_peer(peer, message, now)

    def peer_lost(self, peer: str, now: float) -> None:
        self._note(frames.PeerLost(now, peer))
        self._role.peer_lost(peer, now)

    def grammar_compiled(self, grammar: str, now: float) -> None:
        self._note(frames.GrammarCompiled(now, grammar))
        self._role.grammar_compiled(grammar, now)

    def grammar_failed(self, grammar: str, message: str, now: float) -> None:
        self._note(frames.GrammarFailed(now, grammar, message))
        self._role.grammar_failed(grammar, message, now)

    def plan(self, now: float) -> StepPlan | None:
        plan = self._role.plan(now)
        self._note(frames.Planned(now, plan))
        return plan

    def commit(self, result: StepResult, now: float) -> None:
        self._note(frames.Committed(now, result))
        self._role.commit(result, now)

    def tick(self, now: float) -> bool:
        self._note(frames.Ticked(now))
        return self._role.tick(now)

    def stop(self, message: str, now: float, code: ErrorCode = ErrorCode.SHUTTING_DOWN) -> None:
        self._note(frames.Stopped(now, message, code))
        self._role.stop(message, now, code)


def read_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read beside the configuration."""
    return {name: value for name, value in environ.items() if name in SCHEDULING_VARIABLES}
