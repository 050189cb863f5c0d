"""What a client process still has to send: in the order of its instants, whether it stands in a line or not."""

import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from scripts.load_tester.client.connection import Connection, Exchange
from scripts.load_tester.client.ipc import Ask
from scripts.load_tester.client.send_schedule import LINE_S, MAX_LINE, MAX_LINE_BYTES, Departures


class FakeLine:
    """A courier's line that a test sends from."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.usable: Sequence[Connection] = ()
        self.ring_at = 0.0

    def offer(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)

    def withdraw_first(self) -> None:
        self.exchanges.pop(0)

    def withdraw_last(self) -> None:
        self.exchanges.pop()

    def prepare(self, connections: Sequence[Connection], ring_at: float) -> None:
        self.usable, self.ring_at = connections, ring_at


def ask(index: int, size: int = 1) -> Ask:
    return Ask(index, 0.0, -1, -1.0, 0, b"", b"x" * size)


def departures(line: FakeLine | None) -> Departures:
    return Departures(lambda ask, at: Exchange(ask.index, ask.body, at), line)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.floats(-1.0, 3 * LINE_S)),
        st.tuples(st.sampled_from(["line up", "take", "depart"]), st.just(0.0)),
    ),
    max_size=60,
)


@given(steps, st.booleans())
def test_the_first_goes_first_and_none_goes_twice_or_not_at_all(steps: list[tuple[str, float]], has_line: bool) -> None:
    line = FakeLine() if has_line else None
    waiting = departures(line)
    start_at = time.monotonic()
    waiting.start(start_at)
    left: dict[int, float] = {}
    for number, (step, at) in enumerate(steps):
        gone: Exchange | None = None
        if step == "add":
            waiting.add(at, ask(number))
            left[number] = at
        elif step == "take":
            gone = waiting.take_due()
            assert (gone is not None) == (min(left.values(), default=1e9) <= time.monotonic() - start_at)
        elif line:
            waiting.line_up([])
            assert line.ring_at == start_at + min(
                [at for index, at in left.items() if index not in {one.ask for one in line.exchanges}],
                default=float("inf"),
            )
            if step == "depart" and line.exchanges:
                gone = waiting.take_departed()
                assert line.exchanges.pop(0) is gone
        if gone is not None:
            assert isinstance(gone.ask, int) and gone.intended_at == start_at + left[gone.ask]
            assert left.pop(gone.ask) <= min(left.values(), default=1e9)
        assert len(waiting) == len(left)
    waiting.clear()
    assert not waiting and not (line and line.exchanges)


def test_nothing_is_due_or_lined_up_before_the_start() -> None:
    line = FakeLine()
    waiting = departures(line)
    waiting.add(-1.0, ask(0))
    waiting.line_up([])
    assert waiting.take_due() is None and not line.exchanges and line.ring_at == waiting.next_at == float("inf")


def test_once_the_last_of_all_has_gone_the_courier_rings() -> None:
    waiting = departures(line := FakeLine())
    waiting.start(time.monotonic())
    waiting.add(0.5, ask(0))
    waiting.add(1.5 + LINE_S, ask(1))
    waiting.line_up([], are_all=True)
    assert len(line.exchanges) == 1 and line.ring_at == waiting.next_at
    waiting.clear()
    waiting.add(0.7, ask(2))
    waiting.line_up([])
    assert line.ring_at == float("inf"), "more may come"
    waiting.line_up([], are_all=True)
    assert line.ring_at == line.exchanges[0].intended_at
    line.exchanges.pop()
    waiting.take_departed()
    waiting.line_up([], are_all=True)
    assert line.ring_at == float("inf")


def test_a_line_is_as_long_as_its_time_its_places_and_its_bytes_allow() -> None:
    line = FakeLine()
    waiting = departures(line)
    waiting.start(time.monotonic())
    for number in range(MAX_LINE + 1):
        waiting.add(0.0, ask(number))
    waiting.add(LINE_S + 1.0, ask(MAX_LINE + 1))
    waiting.line_up([])
    assert len(line.exchanges) == MAX_LINE
    for _ in range(MAX_LINE):
        line.exchanges.pop(0)
        waiting.take_departed()
    waiting.line_up([])
    assert len(line.exchanges) == 1, "the last one is too far away"

    large = departures(line := FakeLine())
    large.start(time.monotonic())
    for number in range(3):
        large.add(0.0, ask(number, MAX_LINE_BYTES // 2 + 1))
    large.line_up([])
    assert len(line.exchanges) == 2
