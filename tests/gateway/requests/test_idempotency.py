"""Requests with keys: which are found again, by whom, and how many are kept."""

import gc
import tracemalloc

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import ErrorCode, RequestError
from common.sampling_params import SamplingParams, TokenLogprobs
from common.wire.messages import FromNode, Tokens
from common.wire.packed_logprobs import pack_logprobs
from gateway.requests.idempotency import IdempotencyStore, KeyedRequest, identify, with_key
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream
from gateway.text.output_parser import OutputFormat, TextParser
from scripts.simulator.service.gateway import NoText

PATH = "/v1/completions"


class Reader:
    def __init__(self):
        self.woken = []
        self.is_ended = False

    def wake(self, stream):
        self.woken.append(stream)

    def end(self):
        self.is_ended = True


def make_store(max_results=100, max_bytes=1 << 20, max_age_s=60.0):
    return IdempotencyStore(max_results=max_results, max_bytes=max_bytes, max_age_s=max_age_s)


def identity_of(key="k", body=b"{}", tenant="", path=PATH):
    return identify(path, body, tenant, key, None)


def rid_of(rid, body=b"{}", tenant=""):
    return identify("/generate", body, tenant, None, rid)


def request(rid="r", num_prompt=3, seed=0):
    return GenerateRequest(rid, rid, tuple(range(num_prompt)), SamplingParams(max_new_tokens=8, seed=seed))


def begin(store, identity, num_outputs=1, reader=None):
    keyed = KeyedRequest(identity, "answer", store, reader or Reader())
    for i in range(num_outputs):
        keyed.streams.append(OutputStream(request(f"{identity.key}-{i}"), i, NoText, keyed.wake, 0.0))
    store.add(keyed)
    return keyed


def tokens(stream, index, *ids, finish="", now=1.0):
    stream.on_tokens(Tokens("r", 0, index, ids, finish=finish), now)


class Words:
    """A detokenizer of a new text for each token."""

    def push(self, ids):
        return "".join(f" w{token}" for token in ids)

    def flush(self):
        return ""


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("num_logprobs", [None, 0, 5, 20])
def test_the_counted_bytes_are_those_of_the_memory(num_logprobs, has_parts):
    decoder, count, num_tokens = msgspec.msgpack.Decoder(FromNode), 20, 200
    prompt = tuple(range(1_000, 1_010))
    output_format = OutputFormat(TextParser) if has_parts else None
    store = make_store(max_bytes=1 << 30)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            keyed = KeyedRequest(identity_of(str(number)), "answer", store)
            allowed = tuple(range(1_000, 9_000))
            sampling = SamplingParams(max_new_tokens=num_tokens, logprobs=num_logprobs, allowed_token_ids=allowed)
            wanted = GenerateRequest(f"r{number}", "r", prompt, sampling, output_format=output_format)
            stream = OutputStream(wanted, 0, Words, keyed.wake, 0.0)
            del allowed, sampling, wanted  # only the store refers to them
            keyed.streams.append(stream)
            store.add(keyed)
            for index in range(num_tokens):
                tops = tuple((1_000 + top, -1.5 - top) for top in range(num_logprobs or 0))
                logprobs = () if num_logprobs is None else (pack_logprobs(TokenLogprobs(-1.0 - index, tops)),)
                finish = "length" if index == num_tokens - 1 else ""
                sent = Tokens(f"r{number}", 0, index, (1_000 + index,), logprobs=logprobs, finish=finish)
                stream.on_tokens(decoder.decode(msgspec.msgpack.encode(sent)), 1.0)
        gc.collect()  # what Python keeps of freed tuples is not the store's
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(store) == count
    assert 0.75 * used < store._ended.num_bytes < 1.25 * used
    assert used / (count * num_tokens) < 600, "log-probabilities are kept in a compact form"


def run(store, identity, now=1.0):
    keyed = begin(store, identity)
    tokens(keyed.streams[0], 0, 7, finish="length", now=now)
    return keyed


def test_a_request_is_found_while_it_runs_and_after_its_end():
    store = make_store()
    keyed = begin(store, identity_of())
    assert store.find(identity_of(), 0.0) is keyed
    tokens(keyed.streams[0], 0, 7, finish="length")
    assert store.find(identity_of(), 2.0) is keyed
    assert len(store) == 1


def test_another_body_or_path_under_the_same_key_is_refused():
    store = make_store()
    begin(store, identity_of())
    for other in (identity_of(body=b'{"n":2}'), identity_of(path="/v1/chat/completions")):
        with pytest.raises(RequestError) as refused:
            store.find(other, 0.0)
        assert (refused.value.code, refused.value.status) == (ErrorCode.IDEMPOTENCY_KEY_REUSED, 422)


def test_a_tenant_never_finds_the_request_of_another():
    store = make_store()
    begin(store, identity_of(tenant="one"))
    assert store.find(identity_of(tenant="two"), 0.0) is None
    assert store.find(identity_of(tenant="two", body=b"other"), 0.0) is None


def test_a_rid_may_name_another_request_once_the_first_has_ended():
    store = make_store()
    run(store, rid_of("a"))
    assert store.find(rid_of("a", b"other"), 1.0) is None
    second = run(store, rid_of("a", b"other"))
    assert store.find(rid_of("a", b"other"), 1.0) is second
    assert store.find(rid_of("a"), 1.0) is None
    store.check()


def test_a_rid_is_not_the_key_of_a_header():
    store = make_store()
    run(store, rid_of("k"))
    assert store.find(identity_of("k"), 1.0) is None


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\tbed", "größe"])
def test_a_key_that_is_not_printable_ascii_of_a_usual_length_is_refused(key):
    with pytest.raises(RequestError, match="Idempotency-Key"):
        identity_of(key)


def test_a_request_with_a_failed_output_runs_again():
    store = make_store()
    keyed = begin(store, identity_of(), num_outputs=2)
    tokens(keyed.streams[0], 0, 7, finish="length")
    assert store.find(identity_of(), 1.0) is keyed
    keyed.streams[1].fail(RequestError(ErrorCode.NODE_LOST, "gone"), 1.0)
    assert store.find(identity_of(), 1.0) is None
    assert len(store) == 0


def test_the_end_of_an_output_looks_at_no_other_output():
    class Streams(list):
        num_walks = 0

        def __iter__(self):
            self.num_walks += 1
            return super().__iter__()

    store = make_store()
    keyed = begin(store, identity_of(), num_outputs=9)
    *others, last = keyed.streams
    keyed.streams = Streams(keyed.streams)
    for stream in others:
        tokens(stream, 0, 7, finish="length")
    assert (keyed.is_ended, keyed.has_failed, keyed.streams.num_walks) == (False, False, 0)
    tokens(last, 0, 7, finish="length")
    assert keyed.is_ended
    assert store.find(identity_of(), 1.0) is keyed


def test_a_request_that_failed_before_it_was_added_is_never_known():
    store = make_store()
    keyed = KeyedRequest(identity_of(), "answer", store, Reader())
    keyed.streams.append(OutputStream(request(), 0, NoText, keyed.wake, 0.0))
    keyed.streams[0].fail(RequestError(ErrorCode.NO_ROUTE, "none"), 0.0)
    store.add(keyed)
    assert store.find(identity_of(), 1.0) is None


def test_a_new_reader_gets_the_output_from_its_first_token_and_then_the_rest():
    store, first, second = make_store(), Reader(), Reader()
    keyed = begin(store, identity_of(), reader=first)
    (stream,) = keyed.streams
    tokens(stream, 0, 7)
    assert stream.take().ids == [7]
    keyed.attach(second)
    assert (first.is_ended, second.is_ended) == (True, False)
    assert second.woken == [stream]
    tokens(stream, 1, 8)
    assert stream.take().ids == [7, 8]
    tokens(stream, 2, 9, finish="length")
    assert stream.take().ids == [9]
    assert len(first.woken) == 1
    assert not keyed.detach(first)
    assert keyed.detach(second)


def test_a_new_reader_of_an_output_without_tokens_is_not_woken():
    keyed, reader = begin(make_store(), identity_of()), Reader()
    keyed.attach(reader)
    assert reader.woken == []


def test_results_are_forgotten_after_their_time():
    store = make_store(max_age_s=10.0)
    run(store, identity_of(), now=5.0)
    assert store.find(identity_of(), 15.0) is not None
    assert store.find(identity_of(), 15.1) is None
    assert (len(store), store._ended.num_bytes) == (0, 0)


def test_the_tenant_with_the_most_bytes_loses_its_oldest():
    store = make_store(max_results=3)
    for tenant, key in (("small", "a"), ("large", "b"), ("large", "c"), ("large", "d")):
        run(store, identity_of(key, tenant=tenant))
    assert store.find(identity_of("b", tenant="large"), 1.0) is None
    for tenant, key in (("small", "a"), ("large", "c"), ("large", "d")):
        assert store.find(identity_of(key, tenant=tenant), 1.0) is not None
    store.check()


def test_requests_in_flight_are_known_however_many_results_are_kept():
    store = make_store(max_results=0)
    keyed = begin(store, identity_of())
    assert store.find(identity_of(), 0.0) is keyed
    tokens(keyed.streams[0], 0, 7, finish="length")
    assert store.find(identity_of(), 1.0) is None


def test_seeds_follow_from_the_key_the_body_and_the_number_of_the_output():
    requests = [request("a", seed=5), request("b", seed=6)]
    made = with_key(requests, identity_of(), draws_seed=lambda _: True)
    assert made == with_key(requests, identity_of(), draws_seed=lambda _: True)
    seeds = [request.sampling.seed for request in made]
    assert seeds[1] == (seeds[0] + 1) % 2**64
    others = (identity_of("other"), identity_of(body=b"other"), identity_of(tenant="other"), rid_of("k"))
    different = [with_key(requests, other, draws_seed=lambda _: True)[0] for other in others]
    assert len({seeds[0], *(request.sampling.seed for request in different)}) == 5
    assert len({made[0].key, made[1].key, *(request.key for request in different)}) == 6


def test_seeds_of_the_client_are_kept():
    made = with_key([request("a", seed=5)], identity_of(), draws_seed=lambda _: False)
    assert [one.sampling.seed for one in made] == [5]


class StoreMachine(RuleBasedStateMachine):
    """The books of the store balance, whatever runs, ends, fails and expires."""

    def __init__(self):
        super().__init__()
        self.store = make_store(max_results=4, max_bytes=12_000, max_age_s=10.0)
        self.running = []
        self.now = 0.0

    @rule(key=st.sampled_from("abcdef"), tenant=st.sampled_from(["one", "two"]), body=st.sampled_from([b"x", b"y"]))
    def ask(self, key, tenant, body):
        identity = rid_of(key, body, tenant)
        known = self.store.find(identity, self.now)
        is_in_use = any(other.identity.index == identity.index for other in self.running)
        assert known is not None or not any(other.identity == identity for other in self.running)
        if known is None and not is_in_use:
            self.running.append(begin(self.store, identity))

    @rule(number=st.integers(0, 5), fails=st.booleans(), num_tokens=st.integers(1, 100))
    def end(self, number, fails, num_tokens):
        if number < len(self.running):
            (stream,) = self.running.pop(number).streams
            if fails:
                stream.fail(RequestError(ErrorCode.INTERNAL, "x"), self.now)
            else:
                tokens(stream, 0, *range(num_tokens), finish="stop", now=self.now)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def books_balance(self):
        self.store.check()
        assert len(self.store) >= len(self.running)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30)
