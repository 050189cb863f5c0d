"""Whole transfers between pools with pages of different sizes: every token arrives, in any order of events."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.kv.kv_fakes import DECODE, PREFILL
from support.kv.unequal_nodes import SIZES, Nodes

from common.cache.page_allocator import Owner
from common.errors import ErrorCode
from common.wire.messages import Connected, Grant, PagesWritten
from kv_transfer.events import TransferFailed
from kv_transfer.page_mapping import Units
from kv_transfer.receive.session import ReceiveSession
from kv_transfer.send import write_queue
from kv_transfer.send.session import SendSession

actions = st.lists(
    st.tuples(st.sampled_from(["compute", "grant", "pump", "tick", "hear"]), st.integers(0, 99)), max_size=40
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.sampled_from(SIZES),
    prompts=st.lists(st.integers(1, 28), min_size=1, max_size=3),
    history=actions,
    held=st.integers(0, 3),
    latency=st.integers(0, 2),
)
def test_every_token_of_every_prompt_arrives_in_any_order_of_events(
    sizes: tuple[int, int], prompts: list[int], history: list[tuple[str, int]], held: int, latency: int
) -> None:
    nodes = Nodes(*sizes, latency)
    keys = [nodes.open(num_tokens) for num_tokens in prompts]
    num_targets = [nodes.target.layout.num_pages(num_tokens) for num_tokens in prompts]
    num_computed = [0] * len(keys)
    for action, number in history:
        key, which = keys[number % len(keys)], number % len(keys)
        if action == "compute" and num_computed[which] < len(nodes.sources[key]) - 1:
            num_computed[which] += 1 + number // 7 % (len(nodes.sources[key]) - 1 - num_computed[which])
            nodes.computed(key, num_computed[which])
        elif action == "grant" and key not in nodes.grants:
            first = min(held, num_targets[which])
            nodes.begin(key, first, num_targets[which] - first)
        elif action in ("pump", "hear"):
            getattr(nodes, action)()
        elif action == "tick":
            nodes.wire.tick()
    for which, key in enumerate(keys):
        if key not in nodes.grants:
            nodes.begin(key, 0, num_targets[which])
        nodes.finish(key)
        nodes.pump()
    nodes.run()
    nodes.assert_all_arrived()
    assert nodes.receiver.counters()["stale_messages"] == nodes.sender.counters()["stale_messages"] == 0
    pages = [page for _, pages in nodes.grants.values() for page in pages]
    assert nodes.allocator.count(Owner.REQUEST) == len(pages)
    nodes.close()


def test_at_least_8_mb_are_written_at_once_where_units_are_smaller_than_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of 6 tokens go into pages of 2. The prompt has six units, of which four have as many bytes."""
    nodes = Nodes(6, 2, checksums="all")
    monkeypatch.setattr(write_queue, "LEAST_BYTES", 4 * nodes.target.layout.page_bytes)
    nodes.join()
    key = nodes.open(12)
    nodes.begin(key, 0, 6)
    nodes.hear()
    nodes.finish(key)
    assert nodes.sender.pump(0.0)
    assert nodes.sender.counters()["pages_sent"] == 4
    assert not nodes.sender.pump(0.0)
    assert nodes.sender.counters()["pages_sent"] == 6
    nodes.close()


def test_a_longer_page_is_complete_when_all_its_parts_within_the_prompt_have_arrived() -> None:
    """Pages of 2 tokens go into pages of 6. The prompt has 9 tokens: units 0 to 2 of page 0 and units 0 and 1 of page
    1.
    """
    nodes = Nodes(2, 6)
    nodes.join()
    key = nodes.open(9)
    nodes.begin(key, 0, 2)
    nodes.hear()
    nodes.computed(key, 4)
    nodes.pump()
    told = [(m.indices, m.unit) for m in nodes.to_decode if isinstance(m, PagesWritten)]
    assert told == [((0,), 0), ((0,), 1), ((0,), 2)]
    nodes.pump()
    assert nodes.to_decode[-1] == PagesWritten("r", 0, 1, (1,), 0)
    nodes.hear()
    assert nodes.receiver.counters()["pages_received"] == 1
    nodes.finish(key)
    nodes.run()
    assert nodes.receiver.counters()["pages_received"] == 2
    assert nodes.sender.counters()["pages_sent"] == 5
    nodes.assert_all_arrived()


def test_a_longer_page_fills_several_pages_up_to_the_end_of_the_prompt() -> None:
    """Pages of 6 tokens go into pages of 2. The prompt has 8 tokens, so the last page sent holds 2 of them."""
    nodes = Nodes(6, 2)
    nodes.join()
    key = nodes.open(8)
    nodes.begin(key, 1, 3)
    nodes.hear()
    nodes.computed(key, 1)
    nodes.run()
    assert nodes.receiver.counters()["pages_received"] == 2
    nodes.finish(key)
    nodes.run()
    assert nodes.sender.counters()["bytes_sent"] == 3 * nodes.target.layout.page_bytes
    nodes.assert_all_arrived()


@pytest.mark.parametrize("sizes", [(2, 6), (6, 2)])
def test_a_grant_beyond_what_the_prompt_can_fill_is_refused(sizes: tuple[int, int]) -> None:
    nodes = Nodes(*sizes)
    nodes.join()
    key = nodes.open(9)
    num_pages = nodes.target.num_pages
    nodes.sender.on_message(DECODE, Grant(*key, 1, num_pages, (0,)), 0.0)
    ((_, closed),), _ = nodes.sender.take()
    assert f"the prompt has at most {num_pages}" in closed.message  # type: ignore[attr-defined]
    other = nodes.open(9)
    nodes.finish(other)
    end = nodes.target.layout.num_pages(9)
    nodes.sender.on_message(DECODE, Grant(*other, 1, end, (0,)), 0.0)
    ((_, closed),), _ = nodes.sender.take()
    assert f"the prompt has at most {end}" in closed.message  # type: ignore[attr-defined]


def test_a_number_of_token_ranges_that_does_not_divide_a_page_is_refused() -> None:
    nodes = Nodes(2, 6)
    key = nodes.open(9)
    pages = nodes.allocator.alloc(2, Owner.GRANT)
    nodes.receiver.begin(key, PREFILL, first=0, pages=pages or (), length=9)
    nodes.receiver.on_message(PREFILL, Connected(1, "inprocess", 4), 0.0)
    why = "a page of 6 tokens cannot come in 4 token ranges"
    assert nodes.receiver.take()[1] == [TransferFailed(key, ErrorCode.TRANSFER_FAILED, why)]
    assert nodes.allocator.num_free == nodes.allocator.num_pages


def test_units_beyond_the_end_of_the_prompt_are_never_due() -> None:
    session = SendSession(("r", 0), "peer")
    session.grant(1, 0, [4, 5], Units(2, 1, 3))  # pages of 6 tokens, granted before the prompt is computed
    session.compute([0, 1, 2])
    session.finish([0, 1, 2, 3, 4], 9)
    assert not session.has_ungrantable()
    assert list(session.start(9)) == [0, 1, 2, 3, 4]
    assert session.pages_of([4]) == [(4, 5)]
    session.check()


def test_parts_of_a_page_beyond_the_end_of_the_prompt_are_not_expected() -> None:
    session = ReceiveSession(("r", 0), "peer", first=0, pages=[4, 5], length=9, page_size=6)
    session.grant(1, 3)
    assert session.is_expected([0, 1], 1)
    assert session.is_expected([0], 2)
    assert not session.is_expected([1], 2)
