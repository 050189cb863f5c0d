"""The contract of all transports between processes: the same tests for each, with each end in its own process."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable

import pytest
from support.kv.kv_fakes import DECODE, PREFILL
from support.kv.transport_ends import End, digests, join, ship
from support.kv.transport_process import LAYOUT, NUM_PAGES
from support.waiting import until

#: Transports whose reader places the bytes, so that a fence needs no message from the writer.
PLACED = ("tcp", "gloo")


ZERO = hashlib.sha256(bytes(LAYOUT.page_bytes)).hexdigest()


def test_pages_arrive_unchanged_from_another_process(start: Callable[..., End], transport: str) -> None:
    writer, reader = start("writer", transport), start("reader", transport)
    assert len({writer.pid, reader.pid, os.getpid()}) == 3
    join(writer, reader, transport)
    ship(writer, reader, [(7, 3, 0), (8, 0, NUM_PAGES - 1), (9, 1, 5)])
    assert reader.ask("digest", pages=[0, NUM_PAGES - 1, 5]) == digests(7, 8, 9)
    untouched = [page for page in range(NUM_PAGES) if page not in (0, NUM_PAGES - 1, 5)]
    assert set(reader.ask("digest", pages=untouched)) == {ZERO}
    assert writer.ask("counters")[f"bytes_by_{transport}"] == 3 * LAYOUT.page_bytes


def test_many_concurrent_writes_all_end_and_all_arrive(start: Callable[..., End], transport: str) -> None:
    writer, reader = start("writer", transport), start("reader", transport)
    join(writer, reader, transport)
    reader.ask("allow", peer=PREFILL, epoch=1, pages=list(range(NUM_PAGES)))
    tickets = [writer.ask("write", peer=DECODE, pages=[(100 + i, i, NUM_PAGES - 1 - i)]) for i in range(NUM_PAGES)]
    finished: list[int] = []
    until(lambda: finished.extend(writer.ask("finished")) or len(finished) == NUM_PAGES)
    assert sorted(finished) == tickets
    assert reader.ask("digest", pages=list(range(NUM_PAGES)))[::-1] == digests(*range(100, 100 + NUM_PAGES))


def test_an_empty_write_ends_and_nothing_ends_before_it(start: Callable[..., End], transport: str) -> None:
    writer, reader = start("writer", transport), start("reader", transport)
    join(writer, reader, transport)
    assert writer.ask("finished") == []
    ticket = writer.ask("write", peer=DECODE, pages=[])
    assert until(lambda: writer.ask("finished")) == [ticket]


def test_a_pair_reconnects_repeatedly_and_nothing_is_left_behind(start: Callable[..., End], transport: str) -> None:
    writer, reader = start("writer", transport), start("reader", transport)
    counts: list[tuple[int, int]] = []

    def descriptors() -> tuple[int, int]:
        return writer.ask("descriptors"), reader.ask("descriptors")

    def is_steady() -> bool:
        counts.append(descriptors())
        time.sleep(0.1)
        return descriptors() == counts[-1]

    def is_as_before() -> bool:
        """Fewer may be open than then, if a thread was late to close its own."""
        return is_steady() and all(now <= then for now, then in zip(counts[-1], at_first, strict=True))

    for epoch in range(1, 9):
        join(writer, reader, transport, epoch)
        ship(writer, reader, [(epoch, 0, epoch)], epoch)
        assert writer.ask("detach", peer=DECODE) is True
        assert until(lambda: reader.ask("news"))[0][:2] == [PREFILL, epoch]
        if epoch == 4:
            until(is_steady)
            at_first = counts[-1]
    assert reader.ask("digest", pages=[1, 2, 3, 4]) == digests(1, 2, 3, 4)
    until(is_as_before)  # descriptors do not accumulate
    for end in (writer, reader):
        assert end.ask("close") == "closed"
        assert end.process.wait(60) == 0


def test_death_of_the_writer_is_a_fence(start: Callable[..., End], transport: str) -> None:
    writer, reader = start("writer", transport), start("reader", transport)
    join(writer, reader, transport)
    ship(writer, reader, [(1, 0, 0)])
    reader.ask("allow", peer=PREFILL, epoch=1, pages=[1])
    assert reader.ask("news") == []
    writer.tell("write", peer=DECODE, pages=[(5, 1, 1)])
    writer.kill()
    assert until(lambda: reader.ask("news"))[0][:2] == [PREFILL, 1]
    other = start("writer", transport)
    join(other, reader, transport, epoch=2)
    ship(other, reader, [(2, 0, 1)], epoch=2)
    assert reader.ask("digest", pages=[0, 1]) == digests(1, 2)


def test_death_of_the_reader_ends_all_writes(start: Callable[..., End], transport: str) -> None:
    writer, reader = start("writer", transport), start("reader", transport)
    join(writer, reader, transport)
    ship(writer, reader, [(1, 0, 0)])
    reader.kill()
    writer.ask("write", peer=DECODE, pages=[(2, 1, 1), (3, 2, 2)])
    until(lambda: writer.ask("detach", peer=DECODE))
    writer.ask("news"), writer.ask("finished")
    other = start("reader", transport)
    join(writer, other, transport, epoch=1)
    ship(writer, other, [(4, 3, 3)])
    assert other.ask("digest", pages=[3]) == digests(4)


def test_a_stopped_writer_that_resumes_changes_no_page_of_another_request(
    start: Callable[..., End], transport: str
) -> None:
    writer, reader = start("writer", transport), start("reader", transport)
    join(writer, reader, transport)
    reader.ask("allow", peer=PREFILL, epoch=1, pages=[4, 5])
    writer.signal(signal.SIGSTOP)
    writer.tell("write", peer=DECODE, pages=[(1, 0, 4), (2, 1, 5)])  # completes when the writer wakes up
    reader.ask("forbid", pages=[4, 5])
    reader.ask("withdraw", peer=PREFILL)
    time.sleep(0.2)
    news = reader.ask("news")
    if transport in PLACED:
        assert news[0][:2] == [PREFILL, 1]
        reader.ask("fill", pages=[(50, 4), (51, 5)])  # now pages of another request
    else:
        assert news == [], "a stopped writer was fenced"
    writer.signal(signal.SIGCONT)
    writer.answer()
    if transport not in PLACED:
        until(lambda: writer.ask("finished"))
        assert writer.ask("detach", peer=DECODE) is True
        assert until(lambda: reader.ask("news"))[0][:2] == [PREFILL, 1]
        reader.ask("fill", pages=[(50, 4), (51, 5)])
    time.sleep(0.3)
    assert reader.ask("digest", pages=[4, 5]) == digests(50, 51)


def test_a_stopped_writer_that_is_killed_is_fenced(start: Callable[..., End], transport: str) -> None:
    writer, reader = start("writer", transport), start("reader", transport)
    join(writer, reader, transport)
    writer.signal(signal.SIGSTOP)
    reader.ask("withdraw", peer=PREFILL)
    writer.kill()
    assert until(lambda: reader.ask("news"))[0][:2] == [PREFILL, 1]


@pytest.mark.parametrize("hold_s", [0, 60], ids=["by its thread", "by the loop"])
def test_a_nixl_write_in_flight_delays_the_fence_until_it_ends(start: Callable[..., End], hold_s: int) -> None:
    """Over TCP, UCX needs the reader's participation, so a stopped reader keeps a write in flight."""
    writer = start("writer", "nixl", UCX_TLS="tcp", TEST_HOLD_S=str(hold_s))
    reader = start("reader", "nixl", UCX_TLS="tcp")
    join(writer, reader, "nixl")
    reader.ask("allow", peer=PREFILL, epoch=1, pages=list(range(NUM_PAGES)))
    reader.signal(signal.SIGSTOP)
    writer.ask("write", peer=DECODE, pages=[(i, i, i) for i in range(NUM_PAGES)])
    time.sleep(0.3)
    assert writer.ask("finished") == []
    assert writer.ask("detach", peer=DECODE) is False
    assert writer.ask("detach", peer=DECODE) is False
    reader.signal(signal.SIGCONT)
    until(lambda: writer.ask("detach", peer=DECODE))
    assert until(lambda: reader.ask("news"))[0][:2] == [PREFILL, 1]
    assert reader.ask("digest", pages=list(range(NUM_PAGES))) == digests(*range(NUM_PAGES))


def test_a_nixl_write_ended_by_its_readers_death_is_reported(start: Callable[..., End]) -> None:
    """The sender waits for the ticket and holds the source pages until then."""
    writer, reader = start("writer", "nixl", UCX_TLS="tcp"), start("reader", "nixl", UCX_TLS="tcp")
    join(writer, reader, "nixl")
    reader.signal(signal.SIGSTOP)
    ticket = writer.ask("write", peer=DECODE, pages=[(i, i, i) for i in range(NUM_PAGES)])
    time.sleep(0.3)
    assert writer.ask("detach", peer=DECODE) is False
    assert writer.ask("finished") == []
    reader.kill()
    assert until(lambda: writer.ask("finished")) == [ticket]
    until(lambda: writer.ask("detach", peer=DECODE))


def test_an_offer_is_valid_once(start: Callable[..., End], transport: str) -> None:
    writer, reader, other = start("writer", transport), start("reader", transport), start("writer", transport)
    connect = reader.ask("offer", peer=PREFILL, epoch=1)
    assert writer.ask("attach", peer=DECODE, connect=connect) == ""
    until(lambda: writer.ask("news"))
    problem = other.ask("attach", peer=DECODE, connect=connect) or until(lambda: other.ask("news"))[0][2]
    assert "token" in problem


def test_a_withdrawn_offer_is_void(start: Callable[..., End], transport: str) -> None:
    writer, reader = start("writer", transport), start("reader", transport)
    connect = reader.ask("offer", peer=PREFILL, epoch=1)
    reader.ask("offer", peer=PREFILL, epoch=2)
    problem = writer.ask("attach", peer=DECODE, connect=connect) or until(lambda: writer.ask("news"))[0][2]
    assert "token" in problem


@pytest.mark.parametrize("transport", ["tcp", "nixl", "gloo"])
def test_attaching_to_a_reader_that_never_answers_fails(start: Callable[..., End], transport: str) -> None:
    writer, reader = start("writer", transport, TEST_ATTACH_TIMEOUT_S="3"), start("reader", transport)
    connect = reader.ask("offer", peer=PREFILL, epoch=1)
    reader.signal(signal.SIGSTOP)
    assert writer.ask("attach", peer=DECODE, connect=connect) == ""
    [[peer, epoch, problem, _]] = until(lambda: writer.ask("news"))
    assert (peer, epoch) == (DECODE, 1)
    assert "answer" in problem and transport in problem and "decode-0" in problem
    assert writer.ask("detach", peer=DECODE) is True


@pytest.mark.parametrize("transport", PLACED)
@pytest.mark.parametrize("keys", [("right", "wrong"), ("right", ""), ("", "right")])
def test_another_cluster_key_is_refused(start: Callable[..., End], transport: str, keys: tuple[str, str]) -> None:
    writer, reader = start("writer", transport, keys[0]), start("reader", transport, keys[1])
    connect = reader.ask("offer", peer=PREFILL, epoch=1)
    assert writer.ask("attach", peer=DECODE, connect=connect) == ""
    assert "cluster key" in until(lambda: writer.ask("news"))[0][2]


@pytest.mark.parametrize("transport", PLACED)
def test_pages_travel_under_a_cluster_key(start: Callable[..., End], transport: str) -> None:
    writer, reader = start("writer", transport, "secret"), start("reader", transport, "secret")
    join(writer, reader, transport)
    ship(writer, reader, [(1, 0, 1), (2, 1, 0)])
    assert reader.ask("digest", pages=[0, 1]) == digests(2, 1)


def test_auto_chooses_shared_memory_on_one_host_and_says_why(start: Callable[..., End]) -> None:
    writer, reader = start("writer", "auto"), start("reader", "auto")
    join(writer, reader, "shm")
    ship(writer, reader, [(1, 0, 1)])
    counters = writer.ask("counters")
    assert counters["bytes_by_shm"] == LAYOUT.page_bytes
    assert counters["bytes_by_tcp"] == 0


@pytest.mark.parametrize(
    ("host", "broken"), [("127.0.0.1", ["shm"]), ("0.0.0.0", ["shm"]), ("0.0.0.0", ["shm", "nixl"])]
)
def test_auto_falls_back_to_the_next_working_transport(start: Callable[..., End], host: str, broken: list[str]) -> None:
    """The offers of the preferred transports lead nowhere, as they would from another host."""
    writer, reader = start("writer", "auto", TEST_HOST=host), start("reader", "auto", TEST_HOST=host)
    connect = json.loads(reader.ask("offer", peer=PREFILL, epoch=1))
    offers = json.loads(connect["endpoint"])
    assert ("nixl" in offers) == (host == "0.0.0.0"), "NIXL does not work on this machine"
    for name in broken:
        if name in offers:
            offers[name] = f"baton-{'0' * 32}:{'0' * 64}" if name == "shm" else json.dumps({})
    connect["endpoint"] = json.dumps(offers)
    expected = "nixl" if "nixl" in offers and "nixl" not in broken else "tcp"
    assert writer.ask("attach", peer=DECODE, connect=json.dumps(connect)) == ""
    assert until(lambda: writer.ask("news")) == [[DECODE, 1, "", expected]]
    assert reader.ask("chosen", peer=PREFILL, epoch=1, transport=expected)
    ship(writer, reader, [(1, 0, 1)])
    assert reader.ask("digest", pages=[1]) == digests(1)
    assert writer.ask("counters")[f"bytes_by_{expected}"] == LAYOUT.page_bytes
    assert reader.ask("news") == []
    writer.kill()
    assert until(lambda: reader.ask("news"))[0][:2] == [PREFILL, 1]


def test_a_pair_without_a_common_transport_is_refused_with_an_explanation(start: Callable[..., End]) -> None:
    writer, reader = start("writer", "tcp"), start("reader", "shm")
    problem = writer.ask("attach", peer=DECODE, connect=reader.ask("offer", peer=PREFILL, epoch=1))
    assert problem == "decode-0 takes pages by shm, this prefill node sends by tcp"
