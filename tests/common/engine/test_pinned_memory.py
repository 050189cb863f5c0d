"""Landing memory is locked region by region; a refusal costs speed only. The device's part is played by a list."""

import mmap

from hypothesis import given
from hypothesis import strategies as st

from common.engine import pinned_memory
from common.engine.pinned_memory import PinnedMemory, machine_share

REGION = 64 << 20


class Locks:
    """What a device has locked; ``refuses`` is the reason for which it locks nothing more."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.num_calls = 0
        self.refuses = ""

    def register(self, at: int, num_bytes: int) -> str:
        self.num_calls += 1
        if not self.refuses:
            self.held[at] = num_bytes
        return self.refuses

    def memory(self, num_pages: int, page_bytes: int, max_bytes: int | None = 1 << 40) -> PinnedMemory:
        memory = mmap.mmap(-1, num_pages * page_bytes)
        return PinnedMemory(
            memory,
            num_pages=num_pages,
            page_bytes=page_bytes,
            register=self.register,
            unregister=lambda at: self.held.__delitem__(at),
            max_bytes=max_bytes,
        )


def test_a_region_is_locked_at_its_first_use_and_unlocked_at_the_end() -> None:
    locks = Locks()
    memory = locks.memory(100, 2 << 20)  # 32 pages to a region
    for page in (40, 41, 63, 40):
        memory.pin(page)
    assert locks.held == {memory._at + REGION: REGION}
    memory.pin(99)  # the last region is as long as what is left
    assert locks.held == {memory._at + REGION: REGION, memory._at + 3 * REGION: 4 * (2 << 20)}
    assert locks.num_calls == 2
    memory.close()
    memory.close()
    assert locks.held == {}
    memory.pin(0)
    assert locks.held == {}


def test_no_more_is_locked_than_the_limit() -> None:
    locks = Locks()
    memory = locks.memory(100, 2 << 20, max_bytes=REGION + 1)
    for page in (0, 32, 64, 96, 99):
        memory.pin(page)
    assert locks.held == {memory._at: REGION}


def test_a_refusal_is_logged_once_and_nothing_more_is_asked(caplog: object) -> None:
    locks = Locks()
    locks.refuses = "operation not permitted"
    memory = locks.memory(100, 2 << 20)
    memory.pin(0)
    memory.pin(99)
    assert locks.num_calls == 1
    memory.close()  # fails if it unlocks what was never locked
    assert [record.getMessage() for record in caplog.records] == [  # type: ignore[attr-defined]
        "memory for incoming KV pages cannot be locked, so copies to the GPU are slower: operation not permitted"
    ]


@given(st.integers(1, 300_000), st.integers(1, 2_000), st.data())
def test_every_page_lies_in_one_region_that_begins_at_a_page_of_the_system(
    page_bytes: int, num_pages: int, data: st.DataObject
) -> None:
    locks = Locks()
    memory = locks.memory(num_pages, page_bytes)
    page = data.draw(st.integers(0, num_pages - 1))
    memory.pin(page)
    [(start, num_bytes)] = locks.held.items()
    first = memory._at + page * page_bytes
    assert start <= first and first + page_bytes <= start + num_bytes <= memory._at + num_pages * page_bytes
    assert (start - memory._at) % mmap.PAGESIZE == 0


def test_by_default_a_pool_locks_an_eighth_of_the_machine_at_most() -> None:
    assert 0 < machine_share() < 1 << 50
    locks = Locks()
    assert locks.memory(1, mmap.PAGESIZE, None)._left == machine_share()
    assert pinned_memory.MAX_SHARE == 1 / 8
