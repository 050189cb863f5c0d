"""The table of requests under way, without sockets: who goes out when, step by step."""

from fake_nodes import make_register

from common.clock import ManualClock
from common.config import GatewayConfig
from common.messages import Abort, Generate, Tokens
from common.sampling import SamplingParams
from gateway.dispatch import Dispatch
from gateway.fleet import Fleets, make_fleet
from gateway.relay import Ask, Relay

PREFILL, DECODE = "p" * 32, "d" * 32


class Post:
    """Keeps what is sent, and what is to be done soon until the test lets it be done."""

    def __init__(self):
        self.sent = []
        self.soon = []

    def send(self, message, incarnation):
        self.sent.append((message, incarnation))
        return True

    def lose(self, incarnation):
        raise AssertionError("every node can be reached")

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


class Table:
    """A prefill node, and decode nodes with so many rows each."""

    def __init__(self, *, rows=1, decodes=(DECODE,), **options):
        config = GatewayConfig(gateway_lookahead=0, **(options or {"enable_priority_scheduling": True}))
        fleet = make_fleet(config, "tiny", 300)
        fleet.registry.register(PREFILL, make_register("prefill", "prefill"), 0.0)
        for incarnation in decodes:
            fleet.registry.register(incarnation, make_register("decode", incarnation, max_running=rows), 0.0)
        self.post = Post()
        self.clock = ManualClock(1.0)
        ends = []
        self.requests = Dispatch(
            Fleets([fleet]), self.post, self.clock, on_start=lambda relay, pair: None, on_end=ends.append
        )

    def come(self, *rids, prompts=(0,), **fields):
        relays = []
        for rid, number in zip(rids, prompts, strict=True):
            ask = Ask(rid, rid, (1, 2), SamplingParams(max_new_tokens=1), "tiny", prompt_number=number, **fields)
            relays.append(Relay(ask, 0, Silent(), lambda relay: None, self.requests.ended, self.clock.now()))
        self.requests.dispatch(relays)

    def end(self, rid):
        self.say(PREFILL, rid, self.sent(rid)[-1].attempt)

    def say(self, node, rid, attempt):
        self.requests.on_tokens(node, Tokens(rid, attempt, 0, (5,), finish="length"))

    def sent(self, rid):
        return [message for message in self.post.at(DECODE) if message.rid == rid]


def test_one_that_comes_just_as_a_row_is_free_passes_nobody_who_waits_for_it():
    table = Table()
    for rid in ("first", "waits"):
        table.come(rid)
    table.end("first")
    table.come("late")  # before anybody was sent out for the one that has ended
    assert table.post.at_decode() == ["first"]
    table.post.turn()
    assert table.post.at_decode() == ["first", "waits"]


def test_one_that_comes_just_then_and_is_more_urgent_goes_first():
    table = Table()
    for rid in ("first", "waits"):
        table.come(rid)
    table.end("first")
    table.come("urgent", priority=1)
    table.post.turn()
    table.end("urgent")
    table.post.turn()
    assert table.post.at_decode() == ["first", "urgent", "waits"]


def test_many_that_end_at_once_are_made_up_for_at_once():
    table = Table()
    for rid in "abc":
        table.come(rid)
    table.end("a")
    table.requests.abort("b")
    assert len(table.post.soon) == 1
    table.post.turn()
    assert table.post.at_decode() == ["a", "c"]
    assert table.requests.num_in_flight == 1


def test_an_id_that_is_used_again_is_another_attempt_and_what_is_said_of_the_first_does_not_count():
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


def test_samples_of_a_prompt_go_to_one_pair_and_prompts_to_the_emptiest():
    table = Table(rows=2, decodes=(DECODE, "e" * 32))
    table.come("a0", "a1", "b0", "b1", prompts=(0, 0, 1, 1))
    assert table.post.at_decode() == ["a0", "a1"]


def test_what_a_tenant_is_served_counts_though_it_never_had_to_wait():
    table = Table(schedule_policy="fair")
    for rid, tenant in (("first", "a"), ("a", "a"), ("b", "b")):
        table.come(rid, tenant=tenant)
    table.end("first")  # the output's token is tenant a's
    table.post.turn()
    assert table.post.at_decode() == ["first", "b"]
