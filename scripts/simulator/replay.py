"""Replays a recording of a node (``--record``) through the role's code, and compares plans byte for byte.

The role is built with the recorded configuration, over a transport that returns the recorded results. All recorded
events are repeated at the same instants. A difference means that a decision depends on something that is not an input:
a clock, a random source, the order of a set, an address.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from common.cache.page_allocator import PageAllocator
from common.errors import BatonError
from common.node.recording import format as frames
from common.node.recording.format import RecordingError, read_frames
from common.node.recording.recorder import DEFAULT_RESULTS, config_from
from common.node.worker_context import WorkerContext, make_cache
from decode_node.factory import build as build_decode
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import Attached, AttachError, Fenced
from prefill_node.factory import build as build_prefill
from scripts.simulator.event_queue import EventQueue
from scripts.simulator.service.engine import EmptyPageStore

#: Result types of a transport's methods, by end and name.
RESULTS: dict[tuple[str, str], Any] = {
    ("writer", "attach"): str,  # the error
    ("writer", "poll"): list[Attached],
    ("writer", "write"): int,
    ("writer", "done"): list[int],
    ("writer", "detach"): bool,
    ("writer", "late"): list[str],
    ("writer", "returns"): list[str],
    ("writer", "attach_beside"): bool,
    ("writer", "is_changing"): bool,
    ("reader", "offer"): str,
    ("reader", "offer_beside"): str,
    ("reader", "chosen"): bool,
    ("reader", "poll"): list[Fenced],
}


class NotRecorded(BatonError):
    """The role calls its transport where the recorded one did not."""


class ReplayedTransports:
    """The ends of a node's transports; see ``ReplayedTransport``."""

    def __init__(self, opening: frames.RecordingHeader, news: list[frames.TransportResult]) -> None:
        self.reader, self.writer = (
            ReplayedTransport(opening, [one for one in news if one.end == end], end) for end in ("reader", "writer")
        )


class ReplayedTransport:
    """Returns what one end of the recorded transport returned, call by call."""

    def __init__(self, opening: frames.RecordingHeader, news: list[frames.TransportResult], end: str) -> None:
        self.store: PageStore = EmptyPageStore(opening.layout.layout(), opening.capacity.num_pages)
        self.name = opening.transport
        self.names = opening.transports
        self.num_ranks: int = opening.config.get("tp", 1)
        self._num_calls: Counter[str] = Counter()
        self._news: dict[tuple[str, int], Any] = {}
        for one in news:
            kind = RESULTS.get((end, one.method))
            if kind is None:
                raise RecordingError(f"the {end} of a transport has no {one.method!r}")
            try:
                self._news[one.method, one.call] = msgspec.msgpack.decode(one.result, type=kind)
            except msgspec.DecodeError as error:
                raise RecordingError(f"the {one.call}. result of {one.method}: {error}") from error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            number = self._num_calls[name]
            self._num_calls[name] += 1
            if name not in DEFAULT_RESULTS:
                return None
            if (name, number) not in self._news:
                if DEFAULT_RESULTS[name] is ...:
                    raise NotRecorded(f"the {number}. call of the transport's {name} is not in the recording")
                return DEFAULT_RESULTS[name]
            result = self._news.pop((name, number))
            if name == "attach":
                raise AttachError(result)
            return result

        return call


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay.

    Attributes:
        num_plans: plans of a step that were compared; frames without a step are compared and not counted.
        difference: lines that say where and in what the first difference is; empty if there is none.
    """

    role: str
    num_plans: int
    num_frames: int
    difference: tuple[str, ...] = ()


def replay(path: str) -> Replayed:
    """Replay a whole recording, or as far as the first difference.

    Raises RecordingError: it cannot be read, or is not of this program.
    """
    news: list[frames.TransportResult] = []
    told: list[frames.AnyFrame] = []
    for frame in read_frames(path):
        (news if isinstance(frame, frames.TransportResult) else told).append(frame)  # type: ignore[arg-type]  # so it is
    opening = told[0]
    assert isinstance(opening, frames.RecordingHeader)
    role = _build(opening, ReplayedTransports(opening, news))
    num_plans = number = 0
    try:
        for number, frame in enumerate(told[1:], 1):
            if not isinstance(frame, frames.Planned):
                _tell(role, frame)
            else:
                plan = role.plan(frame.now)
                num_plans += plan is not None
                if frames.encode(plan) != frames.encode(frame.plan):
                    return Replayed(opening.role, num_plans, number, _difference(number, frame, plan))
            outbox = role.outbox
            for said in (outbox.gateway, outbox.peers, outbox.dial, outbox.hang_up, outbox.grammars):
                said.clear()
    except NotRecorded as error:
        return Replayed(opening.role, num_plans, number, (f"frame {number}: {error}",))
    return Replayed(opening.role, num_plans, len(told) - 1)


def _build(opening: frames.RecordingHeader, ends: ReplayedTransports) -> Any:
    try:
        config = config_from(opening.config)
    except TypeError as error:
        raise RecordingError(f"its configuration is of another version: {error}") from error
    allocator = PageAllocator(opening.capacity.num_pages)
    parts = WorkerContext(
        config=config,
        capacity=opening.capacity,
        pool=ends.reader.store,
        layout=ends.reader.store.layout,
        allocator=allocator,
        cache=make_cache(config, allocator),
        clock=EventQueue(),
        digest=opening.digest,
        incarnation=opening.incarnation,
        vocab_size=opening.vocab_size,
        eos_token_ids=opening.eos_token_ids,
        environ=opening.environ,
    )
    if opening.role == "prefill":
        return build_prefill(parts, ends)
    return build_decode(parts, ends)


def _tell(role: Any, frame: frames.AnyFrame) -> None:
    if isinstance(frame, frames.GatewayMessage):
        role.on_gateway(frame.message, frame.now)
    elif isinstance(frame, frames.PeerMessage):
        role.on_peer(frame.peer, frame.message, frame.now)
    elif isinstance(frame, frames.PeerLost):
        role.peer_lost(frame.peer, frame.now)
    elif isinstance(frame, frames.GrammarCompiled):
        role.grammar_compiled(frame.grammar, frame.now)
    elif isinstance(frame, frames.GrammarFailed):
        role.grammar_failed(frame.grammar, frame.message, frame.now)
    elif isinstance(frame, frames.Committed):
        role.commit(frame.result, frame.now)
    elif isinstance(frame, frames.Ticked):
        role.tick(frame.now)
    elif isinstance(frame, frames.Stopped):
        role.stop(frame.message, frame.now, frame.code)
    else:
        raise RecordingError("a recording begins once")


def _difference(number: int, frame: frames.Planned, plan: Any) -> tuple[str, ...]:
    """The first difference in words: the frame, the part of the plan, both values."""
    where = f"frame {number}, at {frame.now:.6f} s"
    if plan is None or frame.plan is None:
        return (f"{where}: recorded {_short(frame.plan)}", f"replayed {_short(plan)}")
    for name in ("step", "admits", "pages", "rows"):
        ours, theirs = getattr(plan, name), getattr(frame.plan, name)
        if frames.encode(ours) == frames.encode(theirs):
            continue
        if name == "step":
            return (f"{where}: recorded step {theirs}", f"replayed step {ours}")
        for index in range(max(len(ours), len(theirs))):
            mine = ours[index] if index < len(ours) else None
            other = theirs[index] if index < len(theirs) else None
            if frames.encode(mine) != frames.encode(other):
                place = f"{where}, step {plan.step}, {name}[{index}]"
                return (f"{place}: recorded {_short(other)}", f"replayed {_short(mine)}")
    raise AssertionError("two plans differ in no part")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else text[:300] + " ..."
