"""The order of events, and the places of events that are not scheduled."""

from hypothesis import given
from hypothesis import strategies as st

from scripts.simulator.event_queue import EventQueue, Place


def run(events: EventQueue) -> None:
    while not events.is_idle:
        events.step()


def test_events_of_one_instant_run_in_the_order_of_the_instants_at_which_they_were_scheduled() -> None:
    events, seen = EventQueue(), list[str]()
    source = events.new_source()
    events.at(2.0, seen.append, "scheduled at 0")
    events.of_source(source, 2.0, seen.append, "of the source, scheduled at 0")
    events.at(1.0, events.at, 2.0, seen.append, "scheduled at 1")
    events.at(2.0, seen.append, "scheduled at 0 as well")
    run(events)
    assert seen == ["of the source, scheduled at 0", "scheduled at 0", "scheduled at 0 as well", "scheduled at 1"]


def test_an_event_is_not_past_while_an_earlier_one_of_its_instant_is_handled() -> None:
    events, seen = EventQueue(), list[bool]()
    earlier = events.new_source()
    place = Place(1.0, 0.0, events.new_source())
    events.of_source(earlier, 1.0, lambda: seen.append(events.is_past(place)))
    events.at(1.0, lambda: seen.append(events.is_past(place)))
    run(events)
    assert seen == [False, True]


INSTANTS = st.integers(0, 4).map(float)


@given(
    st.lists(st.tuples(INSTANTS, INSTANTS, st.integers(0, 2)), min_size=1, max_size=12),
    st.tuples(INSTANTS, INSTANTS, st.integers(1, 2)),
)
def test_a_place_is_past_exactly_when_its_event_would_have_happened(
    others: list[tuple[float, float, int]], own: tuple[float, float, int]
) -> None:
    def played(*, is_scheduled: bool) -> list[bool]:
        """Whether the own event has happened, at each of the others."""
        events, happened, seen = EventQueue(), list[None](), list[bool]()
        for _ in range(2):
            events.new_source()
        place = Place(own[0] + own[1], own[0], own[2])
        if is_scheduled:
            events.at_place(place, happened.append, None)

        def look() -> None:
            seen.append(bool(happened) if is_scheduled else events.is_past(place))

        def schedule(delay: float, source: int) -> None:
            if source and delay:
                events.of_source(source, events.now() + delay, look)
            else:
                events.after(delay, look)

        for scheduled_at, delay, source in others:
            events.at(scheduled_at, schedule, delay, source)
        run(events)
        return seen

    assert played(is_scheduled=False) == played(is_scheduled=True)
