"""The dispatcher without sockets, step by step."""

import pytest
from support.cluster.manual_clock import ManualClock
from support.gateway.fake_nodes import make_register

from common.config.gateway import GatewayConfig
from common.errors import ErrorCode, RequestError
from common.sampling_params import SamplingParams
from common.wire.messages import Abort, Failed, Generate, Tokens
from gateway.requests.dispatcher import SENT_AT_ONCE, Dispatcher
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPools, make_pool

PREFILL, DECODE = "p" * 32, "d" * 32
SHORT = SamplingParams(max_new_tokens=2)


class Post:
    """Keeps the sent messages, and the callbacks for the next turn until ``turn`` calls them."""

    def __init__(self):
        self.sent = []
        self.messages = []
        self.soon = []

    def send(self, message, *incarnations):
        samples = message.samples() if isinstance(message, Generate) else [message]
        self.sent += [(sample, incarnation) for sample in samples for incarnation in incarnations]
        self.messages.append(message)

    def call_later(self, delay_s, act, rid):
        return self

    def cancel(self):
        pass

    def call_soon(self, act):
        self.soon.append(act)

    def turn(self):
        due, self.soon = self.soon, []
        for act in due:
            act()

    def at(self, node):
        return [message for message, to in self.sent if isinstance(message, Generate) and to == node]

    def at_decode(self):
        return [message.rid for message in self.at(DECODE)]


class Silent:
    def push(self, tokens):
        return ""

    def flush(self):
        return ""


class Spelling(Silent):
    """Token 0 is the letter A, 1 is B, and so on."""

    def push(self, tokens):
        return "".join(chr(ord("A") + token) for token in tokens)


class Table:
    """A dispatcher over one prefill node and decode nodes with ``rows`` rows each."""

    def __init__(self, *, rows=1, decodes=(DECODE,), **options):
        config = GatewayConfig(max_dispatch_ahead=0, **(options or {"enable_priority_scheduling": True}))
        pools = [make_pool(config, model, 300) for model in ("tiny", "other")]
        for pool in pools:
            model = pool.model
            pool.registry.register(PREFILL, make_register("prefill", "prefill", model=model), 0.0)
            for incarnation in decodes:
                decode = make_register("decode", incarnation, model=model, max_running=rows)
                pool.registry.register(incarnation, decode, 0.0)
        self.load_meter = pools[0].load_meter
        self.post = Post()
        self.clock = ManualClock(1.0)
        self.ended = []
        self.requests = Dispatcher(WorkerPools(pools), self.post, self.post, self.clock, on_end=self.ended.append)

    def come(self, *rids, prompts=(0,), sampling=SHORT, samplings=None, model="tiny", detokenizer=Silent, **fields):
        streams = []
        samplings = samplings or [sampling] * len(rids)
        for rid, number, sampling in zip(rids, prompts, samplings, strict=True):
            request = GenerateRequest(rid, rid, (1, 2), sampling, model, prompt_number=number, **fields)
            streams.append(OutputStream(request, 0, detokenizer, lambda stream: None, self.clock.now()))
        self.requests.dispatch(streams)

    def end(self, rid):
        self.say(PREFILL, rid, self.sent(rid)[-1].attempt)

    def say(self, node, rid, attempt, *, index=0, finish="length"):
        self.requests.on_tokens(node, Tokens(rid, attempt, index, (5,), finish=finish))

    def sent(self, rid):
        return [message for message in self.post.at(DECODE) if message.rid == rid]


def test_a_new_request_does_not_pass_waiting_ones_when_a_row_is_free():
    table = Table()
    for rid in ("first", "waits"):
        table.come(rid)
    table.end("first")
    table.come("late")  # before the ended request is replaced
    assert table.post.at_decode() == ["first"]
    table.post.turn()
    assert table.post.at_decode() == ["first", "waits"]


def test_the_place_of_a_request_that_pauses_before_its_next_attempt_is_filled_at_once():
    table = Table()
    for rid in ("refused", "waits"):
        table.come(rid)
    attempt = table.sent("refused")[-1].attempt
    table.requests.on_failed(PREFILL, Failed("refused", attempt, ErrorCode.QUEUE_FULL, "5 requests wait"))
    table.post.turn()
    assert table.post.at_decode() == ["refused", "waits"]


def test_a_more_urgent_new_request_goes_first_when_a_row_is_free():
    table = Table()
    for rid in ("first", "waits"):
        table.come(rid)
    table.end("first")
    table.come("urgent", priority=1)
    table.post.turn()
    table.end("urgent")
    table.post.turn()
    assert table.post.at_decode() == ["first", "urgent", "waits"]


def test_requests_that_end_together_are_replaced_in_one_turn():
    table = Table()
    for rid in "abc":
        table.come(rid)
    table.end("a")
    table.requests.abort("b")
    assert len(table.post.soon) == 1
    table.post.turn()
    assert table.post.at_decode() == ["a", "c"]
    assert table.requests.num_in_flight == 1


def test_a_decode_node_is_told_whether_the_prefill_node_has_finished_the_output():
    table = Table()
    table.come("a")
    table.end("a")
    table.come("b")
    table.requests.abort("b")
    aborts = [message for message, node in table.post.sent if isinstance(message, Abort) and node == DECODE]
    told = [(abort.rid, abort.reason) for abort in aborts]
    assert told == [("a", "finished"), ("b", "aborted")]


def test_a_stop_leaves_requests_with_a_key_to_the_nodes_for_another_gateway():
    table = Table(rows=2)
    table.come("keyed", key="k")
    table.come("plain")
    table.requests.shut_down()
    table.say(DECODE, "keyed", table.sent("keyed")[-1].attempt)  # before its connection to this gateway ends
    told = [(message.rid, node) for message, node in table.post.sent if isinstance(message, Abort)]
    assert told == [("plain", PREFILL), ("plain", DECODE)]
    assert [stream.error.code for stream in table.ended] == [ErrorCode.SHUTTING_DOWN] * 2


def test_an_evicted_request_does_not_count_as_an_arrival():
    table = Table(max_queued_requests=1, enable_priority_scheduling=True)
    table.load_meter.sample(0, 0.0)
    for rid, priority in (("first", 0), ("evicted", 0), ("urgent", 1)):
        table.come(rid, priority=priority)
    assert [(stream.request.rid, stream.error.code) for stream in table.ended] == [("evicted", ErrorCode.QUEUE_FULL)]
    table.load_meter.sample(table.requests.num_in_flight, 10.0)
    assert table.load_meter.load(0).requests == 0.2


@pytest.mark.parametrize(("finish", "reason"), [("", "stopped"), ("length", "finished"), ("stop", "finished")])
def test_a_stop_string_in_the_first_token_ends_the_request_on_one_node(finish, reason):
    """The prefill node has counted a request whose last token it has sampled, so the decode node must not."""
    table = Table()
    table.come("a", detokenizer=Spelling, stops=("F",), keep_stop=True)  # token 5
    attempt = table.sent("a")[-1].attempt
    table.say(PREFILL, "a", attempt, finish=finish)
    assert (table.ended[0].finish, table.ended[0].matched) == ("stop", "F")
    assert [message for message, node in table.post.sent if isinstance(message, Abort) and node == DECODE] == [
        Abort("a", attempt, reason)
    ]


def test_tokens_of_an_earlier_attempt_with_the_same_id_are_refused():
    table = Table()
    table.come("mine")
    table.end("mine")
    table.come("mine")
    first, second = (generate.attempt for generate in table.sent("mine"))
    assert first != second
    table.say(PREFILL, "mine", first)
    assert (Abort("mine", first), PREFILL) in table.post.sent
    assert table.requests.num_in_flight == 1
    table.say(PREFILL, "mine", second)
    assert table.requests.num_in_flight == 0


def test_samples_share_a_pair_and_prompts_go_to_the_emptiest():
    table = Table(rows=2, decodes=(DECODE, "e" * 32))
    table.come("a0", "a1", "b0", "b1", prompts=(0, 0, 1, 1))
    assert table.post.at_decode() == ["a0", "a1"]


@pytest.mark.parametrize(
    ("max_new", "ignore_eos", "num_said", "count", "seconds", "then"),
    [
        (101, True, 11, 1, 26.0, 52.0),  # 50 and 52.5 s in all, two at once: one ends every 25.6 s
        (101, False, 11, 1, 6.0, 11.0),  # unknown length: as many tokens again, 10.5 s in all
        (13, False, 11, 1, 4.0, 8.0),  # but at most two, and seven: 6 and 8.5 s
        (21, True, 11, 2, 12.0, 17.0),  # 10 and 12.5 s
        (21, True, 1, 1, 1.0, 1.0),  # no pace is known
    ],
)
def test_retry_after_of_a_fresh_service_is_estimated_from_requests_in_flight(
    max_new, ignore_eos, num_said, count, seconds, then
):
    table = Table(rows=2, max_queued_requests=0)
    for rid, more in (("short", 0), ("long", 5)):
        sampling = SamplingParams(max_new_tokens=max_new + more, ignore_eos=ignore_eos)
        table.come(rid, sampling=sampling, expected_output=(max_new + more) * ignore_eos)
        table.say(PREFILL, rid, table.sent(rid)[-1].attempt, finish="")
    table.come("elsewhere", model="other", sampling=SamplingParams(max_new_tokens=13))
    table.say(PREFILL, "elsewhere", table.sent("elsewhere")[-1].attempt, finish="")
    for index in range(1, num_said):
        table.clock.advance(0.5)
        for rid in ("short", "long", "elsewhere"):
            table.say(DECODE, rid, table.sent(rid)[-1].attempt, index=index, finish="")
    with pytest.raises(RequestError) as caught:
        table.come(*"ab"[:count], prompts=range(count))
    assert caught.value.retry_after_s == seconds
    with pytest.raises(RequestError) as caught:
        table.come("c")
    assert caught.value.retry_after_s == then


def test_service_is_accounted_for_requests_that_never_waited():
    table = Table(schedule_policy="fair")
    for rid, tenant in (("first", "a"), ("a", "a"), ("b", "b")):
        table.come(rid, tenant=tenant)
    table.end("first")  # its token is charged to tenant a
    table.post.turn()
    assert table.post.at_decode() == ["first", "b"]


def test_many_outputs_are_sent_in_several_turns():
    table = Table(rows=300)
    rids = [f"r{i}" for i in range(SENT_AT_ONCE * 2 + 10)]
    table.come(*rids, prompts=[0] * len(rids))
    assert table.post.at_decode() == rids[:SENT_AT_ONCE]
    table.come("later")
    assert len(table.post.soon) == 1
    table.post.turn()
    assert table.post.at_decode() == rids[: 2 * SENT_AT_ONCE]
    table.post.turn()
    assert table.post.at_decode() == [*rids, "later"]
    assert not table.post.soon
    told = table.requests.decisions.last(999, 0.0)
    assert all("full" not in decided.reason for decided in told if decided.rid in rids)


def test_long_prompts_are_sent_one_per_turn(monkeypatch):
    monkeypatch.setattr("gateway.requests.dispatcher.TOKENS_AT_ONCE", 5)  # each has two
    table = Table(rows=4)
    table.come(*"abcdef", prompts=[0] * 6)
    assert table.post.at_decode() == ["a", "b"]
    table.post.turn()
    assert table.post.at_decode() == ["a", "b", "c", "d"]
    assert not table.post.soon, "there are four rows"
    for rid in "abcd":
        table.end(rid)
    monkeypatch.setattr("gateway.requests.dispatcher.TOKENS_AT_ONCE", 1)  # fewer than any has
    table.post.turn()
    assert table.post.at_decode()[4:] == ["e"]
    table.post.turn()
    assert table.post.at_decode()[4:] == ["e", "f"]


def test_samples_of_a_prompt_share_a_message_which_carries_the_prompt_once():
    table = Table(rows=4)
    seeds = [SamplingParams(seed=seed) for seed in (7, 8, 7, 9)]
    table.come(*"abcd", prompts=(0, 0, 1, 1), samplings=seeds)
    first, second = table.post.messages
    assert [sample.rid for sample in first.others] == ["b"]
    assert [(sample.rid, sample.sampling.seed) for sample in second.samples()] == [("c", 7), ("d", 9)]
    assert len({sample.attempt for message in (first, second) for sample in message.samples()}) == 4
    for node in (PREFILL, DECODE):
        assert [(sample.rid, sample.sampling) for sample in table.post.at(node)] == list(
            zip("abcd", seeds, strict=True)
        )


def test_a_sample_of_another_priority_has_its_own_message():
    table = Table(rows=2)
    for rid in ("first", "second"):
        table.come(rid)
    table.come(*"ab", prompts=(0, 0))
    table.requests.reprioritize("b", "", 5, None)
    table.end("first")
    table.end("second")
    table.post.messages.clear()
    table.post.turn()
    assert [(message.rid, message.others) for message in table.post.messages] == [("b", ()), ("a", ())]


def busy(*, num_waiting, **options):
    """One row, which has served sixteen requests for a second each and is taken; others wait."""
    table = Table(max_queued_requests=100, **options)
    for number in range(17):
        table.come(f"served{number}")
    for number in range(16):
        table.clock.advance(1.0)
        table.end(f"served{number}")
        table.post.turn()
    for number in range(num_waiting):
        table.come(f"waits{number}")
    return table


def test_a_request_whose_deadline_the_queue_ahead_cannot_meet_is_refused_at_once():
    table = busy(num_waiting=5)
    with pytest.raises(RequestError) as caught:
        table.come("late", timeout_s=6.0)
    assert caught.value.code is ErrorCode.QUEUE_FULL
    assert caught.value.message == (
        "its deadline of 6 s is too early: 5 requests wait ahead of this one, and will take about 5.0 s; retry later,"
        " or allow more time"
    )
    assert caught.value.retry_after_s == 1.0
    table.come("patient", timeout_s=6.6)  # the queue and one and a half times its own service
    assert table.requests.num_in_flight == 7


def test_a_deadline_is_never_too_early_for_a_request_that_nothing_tells_about():
    fresh = Table(max_queued_requests=100, schedule_policy="fcfs")
    for number in range(20):
        fresh.come(f"waits{number}")
    fresh.come("accepted", timeout_s=0.01)  # nothing has ended yet
    urgent = busy(num_waiting=5, enable_priority_scheduling=True)
    urgent.come("accepted", timeout_s=2.0, priority=1)  # it passes the others
    first = busy(num_waiting=5, schedule_policy="lof")
    first.come("accepted", timeout_s=2.0, samplings=[SamplingParams(max_new_tokens=1_000)])  # it passes the others


def test_a_waiting_request_with_too_little_time_left_is_not_sent():
    table = busy(num_waiting=0)
    table.come("late", timeout_s=2.5)
    table.come("next")
    table.clock.advance(2.1)  # the one before it takes longer than others did; 0.4 s are left, and the least is 0.5
    table.end("served16")
    table.post.turn()
    table.post.turn()
    assert table.post.at_decode()[-1] == "next"
    ended = table.ended[-1]
    assert (ended.request.rid, ended.error.code) == ("late", ErrorCode.DEADLINE_EXCEEDED)
    assert ended.error.message == "there is too little time left before its deadline of 2.5 s"


def test_a_paused_request_takes_no_place_of_others_but_only_as_many_are_paused_as_there_are_places():
    table = Table(max_queued_requests=0)  # one row
    table.come("slow")
    assert is_refused(table, "early")
    table.requests.set_paused("slow", True)
    table.come("other")
    assert table.post.at_decode() == ["slow", "other"]
    assert is_refused(table, "third")
    table.requests.set_paused("other", True)
    assert is_refused(table, "fourth")  # one of the two counts
    table.requests.abort("slow")
    table.come("fifth")
    table.requests.set_paused("other", False)
    assert is_refused(table, "sixth")
    for rid in ("other", "fifth"):
        table.end(rid)
    table.come("last")
    assert is_refused(table, "seventh")


def is_refused(table, rid):
    with pytest.raises(RequestError) as caught:
        table.come(rid)
    return caught.value.code is ErrorCode.QUEUE_FULL


def test_the_time_of_a_request_that_was_paused_tells_nothing_about_the_nodes():
    """Sixteen requests took a second each, and one was not read for 100 s. With that, 3 s would not be enough."""
    table = Table(max_queued_requests=100, rows=2)
    table.come("slow")
    table.requests.set_paused("slow", True)
    table.clock.advance(100.0)
    for number in range(16):
        table.come(f"served{number}")
        table.clock.advance(1.0)
        table.end(f"served{number}")
        table.post.turn()
    table.requests.set_paused("slow", False)
    table.end("slow")
    table.post.turn()
    for number in range(3):
        table.come(f"waits{number}")
    table.come("accepted", timeout_s=3.0)
    assert table.requests.num_in_flight == 4


def test_an_objective_that_the_queue_cannot_meet_is_refused_if_the_operator_says_so():
    busy(num_waiting=5).come("late", slo_ttft_s=4.0)
    table = busy(num_waiting=5, refuse_hopeless=True)
    with pytest.raises(RequestError) as caught:
        table.come("late", slo_ttft_s=4.0)
    assert caught.value.code is ErrorCode.QUEUE_FULL
    assert caught.value.message.startswith("its slo_ttft_ms of 4000 is too early: 5 requests wait ahead of this one")
    table.come("in time", slo_ttft_s=5.5)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_waiting_request_whose_objective_has_passed_is_not_sent_if_the_operator_says_so(is_refused):
    table = busy(num_waiting=0, refuse_hopeless=is_refused)
    table.come("late", slo_ttft_s=2.0)
    table.clock.advance(2.1)
    table.end("served16")
    table.post.turn()
    assert ("late" in table.post.at_decode()) is not is_refused


@pytest.mark.parametrize("waits", [False, True])
def test_a_message_that_cannot_be_sent_ends_its_own_requests_alone(waits):
    """Its samples wait ahead of another request of the same model and of one of the other model, or none waits."""
    table = Table(rows=3)
    first = {"tiny": "abc" if waits else "", "other": "def" if waits else ""}
    for model, rids in first.items():
        if rids:
            table.come(*rids, prompts=range(len(rids)), model=model)
    send = table.post.send

    def fail_or_send(message, *incarnations):
        if isinstance(message, Generate) and message.rid == "bad":
            raise OverflowError("the budget is too large")
        send(message, *incarnations)

    table.post.send = fail_or_send
    table.come("bad", "bad too", "good", prompts=(0, 0, 1))
    table.come("elsewhere", model="other")
    for rid in "abcdef" if waits else "":
        table.end(rid)
    table.post.turn()
    assert table.post.at_decode()[-2:] == ["good", "elsewhere"]
    failed = [(stream.request.rid, stream.error.code) for stream in table.ended if stream.error]
    assert failed == [("bad", ErrorCode.INTERNAL), ("bad too", ErrorCode.INTERNAL)]
    assert table.requests.num_in_flight == table.requests.num_at(DECODE) == 2
