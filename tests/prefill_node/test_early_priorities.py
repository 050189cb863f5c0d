"""What a decode node lends to a request that its prefill node has not heard of yet: kept, but not for everybody."""

from random import Random

import pytest
from support.fake_engine import expected_output
from support.local_cluster import LocalCluster, Member, prompt_of, sampling
from support.rough_cluster import RoughCluster, end_by_client

from common.config.scheduling import PriorityRules
from common.request import LOWEST_PRIORITY, Request
from common.wire.messages import Generate, Message, Reprioritize
from prefill_node.early_priorities import LEASE_S, MAX_OF_PEER, EarlyLoans

ONE, OTHER = "decode-1".ljust(32, "."), "decode-2".ljust(32, ".")
PRIORITIES = PriorityRules(is_enabled=True)


class SlowGateway(LocalCluster):
    """Prefill nodes hear of requests when the test says so."""

    def __init__(self) -> None:
        self.held_back: list[tuple[Member, Message]] = []
        super().__init__(num_prefill=2, page_size=4, chunk_tokens=4, rules=PRIORITIES)

    def tell(self, member: Member, message: Message) -> None:
        if isinstance(message, Generate) and member in self.prefill:
            self.held_back.append((member, message))
        else:
            super().tell(member, message)

    def catch_up(self, rid: str) -> None:
        """What has been held back of this request arrives."""
        for member, message in self.held_back:
            if isinstance(message, Generate) and message.rid == rid:
                super().tell(member, message)

    def request(self, rid: str) -> Request:
        """As its prefill node knows it."""
        found: Request = next(
            r for member in self.prefill for key, r in member.role._scheduler.requests.items() if key[0] == rid
        )
        return found

    def submit_low_and_urgent(self) -> None:
        """An urgent one waits for the prefix of another, of which the prefill node has not heard yet."""
        self.submit("low", prompt_of(60), sampling(4), priority=1)
        self.step()
        self.submit("urgent", prompt_of(64), sampling(4), pair=(1, 0), priority=9)
        self.settle(2)


def test_what_is_lent_before_the_request_comes_counts_when_it_comes_and_until_it_is_taken_back() -> None:
    cluster = SlowGateway()
    cluster.submit_low_and_urgent()
    cluster.catch_up("low")
    assert (cluster.request("low").priority, cluster.request("low").inherited_priority) == (1, 9)
    cluster.step()
    assert cluster.request("low").inherited_priority == 9
    cluster.answers["urgent"].finish = "aborted"
    cluster.abort("urgent")
    cluster.settle(2)
    assert cluster.request("low").inherited_priority == LOWEST_PRIORITY
    cluster.run()
    assert cluster.answers["low"].output == expected_output(prompt_of(60), 4)
    assert all(len(member.role._early_loans) == 0 for member in cluster.prefill)


def test_what_is_taken_back_before_the_request_comes_does_not_count() -> None:
    cluster = SlowGateway()
    cluster.submit_low_and_urgent()
    assert len(cluster.prefill[0].role._early_loans) == 1
    cluster.answers["urgent"].finish = "aborted"
    cluster.abort("urgent")
    cluster.settle(2)
    assert len(cluster.prefill[0].role._early_loans) == 0
    cluster.catch_up("low")
    assert cluster.request("low").inherited_priority == LOWEST_PRIORITY


def test_what_strangers_lend_and_what_nodes_lent_that_are_gone_is_not_kept() -> None:
    cluster = SlowGateway()
    cluster.submit_low_and_urgent()
    role, now = cluster.prefill[0].role, cluster.clock.now()
    for number in range(10):
        role.on_peer("s" * 32, Reprioritize(f"r{number}", 0, 50), now)
    assert len(role._early_loans) == 1, "a stranger's loans are kept"
    cluster.kill(cluster.decode[0])
    assert len(role._early_loans) == 0


def test_a_decode_node_may_lend_early_only_so_often_and_pushes_out_nothing_but_its_own() -> None:
    loans = EarlyLoans()
    loans.keep(OTHER, ("r", 0), 7, 0.0)
    for number in range(MAX_OF_PEER + 2):
        loans.keep(ONE, ("r", number), number, 1.0)
    assert len(loans) == MAX_OF_PEER + 1
    assert [loans.take(ONE, ("r", number), 2.0) for number in (0, 1, 2, 2)] == [None, None, 2, None]
    assert loans.take(OTHER, ("r", 0), 2.0) == 7
    loans.keep(ONE, ("r", 5), 50, 2.0)  # lent more
    assert loans.take(ONE, ("r", 5), 2.0) == 50


def test_what_is_lent_early_is_forgotten_after_a_while() -> None:
    loans = EarlyLoans()
    loans.keep(ONE, ("in time", 0), 7, 0.0)
    loans.keep(ONE, ("late", 0), 7, 0.0)
    assert loans.take(ONE, ("in time", 0), LEASE_S - 0.1) == 7
    assert loans.take(ONE, ("late", 0), LEASE_S) is None
    loans.keep(ONE, ("old", 0), 7, 0.0)
    loans.keep(ONE, ("new", 0), 7, LEASE_S)
    assert len(loans) == 1


@pytest.mark.parametrize("seed", range(12))
def test_however_late_messages_are_both_nodes_agree_on_what_is_lent_once_they_have_arrived(seed: int) -> None:
    random = Random(seed)
    cluster = RoughCluster(
        random, slowness=6, num_prefill=2, page_size=4, chunk_tokens=4, decode_pages=40, prefill_pages=60,
        max_running=3, rules=PRIORITIES,
    )  # fmt: skip
    num_lent = 0
    for number in range(14):
        prompt = (*prompt_of(24, random.randint(0, 1)), *prompt_of(12, 50 + random.randint(0, 3)))
        priority = random.randint(-5, 9)
        cluster.submit(f"r{number}", prompt, sampling(4), pair=(random.randint(0, 1), 0), priority=priority)
        for _ in range(random.randint(0, 6)):
            cluster.step()
            num_lent += agreed_loans(cluster)
        open_rids = [rid for rid, answer in cluster.answers.items() if not answer.is_over]
        if open_rids and random.random() < 0.2:
            end_by_client(cluster, random.choice(open_rids), "left")
    cluster.finish(may_wait=False)
    assert num_lent > 0, "nothing was ever lent"


def agreed_loans(cluster: RoughCluster) -> int:
    """How many loans of the decode node its prefill nodes know of; all, but for what is still on its way."""
    [decode] = cluster.decode
    loans = decode.role._scheduler.line.loans
    num_lent = 0
    for prefill in cluster.prefill:
        if any(cluster._links.get(ends) for ends in ((decode.name, prefill.name), ("gateway", prefill.name))):
            continue
        for key, request in prefill.role._scheduler.requests.items():
            if key in decode.role._scheduler.places.receiving:
                assert request.lent_priority == loans._told.get(key, LOWEST_PRIORITY), key
                num_lent += request.lent_priority > LOWEST_PRIORITY
    return num_lent
