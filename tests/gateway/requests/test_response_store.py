"""The store of finished responses: its limits, its order, and who sees what."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import ErrorCode, RequestError
from gateway.requests.response_store import ResponseStore, StoredResponse


def make_store(max_responses=100, max_bytes=10_000, max_age_s=60.0):
    return ResponseStore(max_responses=max_responses, max_bytes=max_bytes, max_age_s=max_age_s)


def response(name, previous=None, size=10):
    return StoredResponse(name, previous, b"", b"x" * (size // 2), b"x" * (size - size // 2))


def names(found):
    return [stored.response_id for stored in found]


def has(store, tenant, name, now=0.0):
    try:
        store.get(tenant, name, now)
    except RequestError:
        return False
    return True


def test_a_conversation_comes_back_from_its_beginning():
    store = make_store()
    for name, previous in (("a", None), ("b", "a"), ("other", None), ("c", "b")):
        store.add("t", response(name, previous), 0.0)
    assert names(store.conversation("t", "c", 1.0)) == ["a", "b", "c"]
    assert names(store.conversation("t", "b", 1.0)) == ["a", "b"]


def test_a_tenant_sees_only_its_own_responses():
    store = make_store()
    store.add("one", response("a"), 0.0)
    assert has(store, "one", "a")
    with pytest.raises(RequestError) as refused:
        store.get("two", "a", 0.0)
    assert refused.value.status == 404
    with pytest.raises(RequestError) as refused:
        store.conversation("two", "a", 0.0)
    assert refused.value.code == ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND
    assert refused.value.param == "previous_response_id"
    with pytest.raises(RequestError):
        store.delete("two", "a", 0.0)
    assert has(store, "one", "a")


def test_a_deleted_response_is_gone_and_breaks_the_conversations_that_continue_it():
    store = make_store()
    store.add("", response("a"), 0.0)
    store.add("", response("b", "a"), 0.0)
    store.delete("", "a", 0.0)
    assert not has(store, "", "a")
    with pytest.raises(RequestError, match="'a' is not stored"):
        store.conversation("", "b", 0.0)


def test_the_response_unused_for_longest_leaves_first():
    store = make_store(max_responses=2)
    store.add("", response("a"), 0.0)
    store.add("", response("b"), 1.0)
    store.get("", "a", 2.0)
    store.add("", response("c"), 3.0)
    assert [has(store, "", name) for name in "abc"] == [True, False, True]


def test_the_beginning_of_a_conversation_outlives_its_branches():
    store = make_store(max_responses=3)
    store.add("", response("root"), 0.0)
    for i in range(5):
        store.add("", response(f"branch {i}", "root"), float(i))
    assert [has(store, "", name) for name in ("root", "branch 2", "branch 3", "branch 4")] == [True, False, True, True]


def test_bytes_are_bounded_and_a_response_that_is_too_large_displaces_nothing():
    store = make_store(max_bytes=25)
    store.add("", response("a"), 0.0)
    store.add("", response("b"), 0.0)
    store.add("", response("large", size=26), 0.0)
    assert (len(store), store._cache.num_bytes, has(store, "", "large")) == (2, 20, False)
    store.add("", response("c"), 0.0)
    assert [has(store, "", name) for name in "abc"] == [False, True, True]


def test_a_tenant_displaces_its_own_responses_and_not_those_of_others():
    store = make_store(max_responses=3)
    store.add("quiet", response("q"), 0.0)
    for i in range(9):
        store.add("busy", response(f"b{i}"), 1.0 + i)
    assert has(store, "quiet", "q")
    assert has(store, "busy", "b8")


def test_many_small_responses_of_a_tenant_displace_no_large_one_of_another():
    store = make_store(max_responses=3)
    store.add("quiet", response("q", size=1_000), 0.0)
    for i in range(9):
        store.add("busy", response(f"b{i}", size=1), 1.0 + i)
    assert has(store, "quiet", "q")


def test_large_responses_of_a_tenant_displace_no_small_ones_of_another():
    store = make_store(max_bytes=2_000)
    for i in range(5):
        store.add("quiet", response(f"q{i}"), 0.0)
    for i in range(5):
        store.add("busy", response(f"b{i}", size=900), 1.0 + i)
    assert all(has(store, "quiet", f"q{i}") for i in range(5))


def test_a_response_expires_after_its_last_use():
    store = make_store(max_age_s=10.0)
    store.add("", response("a"), 0.0)
    store.add("", response("b", "a"), 8.0)  # continues a, which counts as a use
    store.add("", response("c"), 9.0)
    assert names(store.conversation("", "b", 18.0)) == ["a", "b"]
    assert not has(store, "", "c", 20.0)
    assert len(store) == 2
    assert not has(store, "", "b", 29.0)
    assert len(store) == 0


def test_a_store_of_no_responses_is_off():
    store = make_store(max_responses=0)
    store.add("", response("a"), 0.0)
    assert (len(store), store.is_enabled) == (0, False)


class Stores(RuleBasedStateMachine):
    """Any order of calls keeps the limits, and whatever a conversation returns is complete."""

    def __init__(self):
        super().__init__()
        self.store = make_store(max_responses=5, max_bytes=60, max_age_s=20.0)
        self.previous = {}
        self.now = 0.0

    @rule(tenant=st.sampled_from(["", "a", "b"]), size=st.integers(0, 70), continues=st.integers(0, 8))
    def add(self, tenant, size, continues):
        name = f"r{len(self.previous)}"
        known = [key for key in self.previous if key[0] == tenant]
        previous = known[-continues][1] if 0 < continues <= len(known) else None
        self.previous[tenant, name] = previous
        self.store.add(tenant, response(name, previous, size), self.now)

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds):
        self.now += seconds

    @rule(number=st.integers(0, 8))
    def read(self, number):
        if number < len(self.previous):
            tenant, name = list(self.previous)[-number - 1]
            try:
                found = self.store.conversation(tenant, name, self.now)
            except RequestError:
                return
            expected = [name]
            while (before := self.previous[tenant, expected[0]]) is not None:
                expected.insert(0, before)
            assert names(found) == expected

    @rule(number=st.integers(0, 8))
    def delete(self, number):
        if number < len(self.previous):
            key = list(self.previous)[-number - 1]
            if has(self.store, *key, self.now):
                self.store.delete(*key, self.now)
            assert not has(self.store, *key, self.now)

    @invariant()
    def holds(self):
        self.store.check()


Stores.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStores = Stores.TestCase
