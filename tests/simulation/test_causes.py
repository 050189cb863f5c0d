"""Both nodes of a pair report a failed request to the gateway with the same error code, unless one of them ends."""

from collections.abc import Callable

import pytest
from support.cluster.local_cluster import LocalCluster, Member, assert_all_pages_are_released, prompt_of, sampling

from common.errors import ErrorCode
from common.wire.messages import Abort, Failed, Message


class SlowGateway(LocalCluster):
    """A gateway that does not forward aborts, so that each node reports the failure by itself."""

    def __init__(self, **options: int) -> None:
        super().__init__(chunk_tokens=16, latency=3, **options)
        self.failures: list[Failed] = []
        self._senders: list[str] = []  # of the failures

    def failures_of(self, sender: str) -> list[Failed]:
        return [failure for failure, name in zip(self.failures, self._senders, strict=True) if name == sender]

    def tell(self, member: Member, message: Message) -> None:
        if not isinstance(message, Abort):
            super().tell(member, message)

    def _hear(self, sender: Member, message: Message) -> None:
        super()._hear(sender, message)
        if isinstance(message, Failed):
            self.failures.append(message)
            self._senders.append(sender.name)


def lose_decode(cluster: LocalCluster) -> None:
    cluster.decode[0].is_alive = False
    cluster.prefill[0].role.peer_lost(cluster.decode[0].name, cluster.clock.now())


def lose_prefill(cluster: LocalCluster) -> None:
    cluster.prefill[0].is_alive = False
    cluster.prefill[0].transport.die()
    cluster.decode[0].role.peer_lost(cluster.prefill[0].name, cluster.clock.now())


def stop_decode(cluster: LocalCluster) -> None:
    cluster.decode[0].role.stop("the node is stopping", cluster.clock.now())


def fail_decode(cluster: LocalCluster) -> None:
    cluster.decode[0].role.stop("the node failed", cluster.clock.now(), ErrorCode.INTERNAL)


def be_late(cluster: LocalCluster) -> None:
    cluster.clock.advance(10.0)


CAUSES: dict[Callable[[LocalCluster], None], ErrorCode] = {
    lose_decode: ErrorCode.NODE_LOST,
    lose_prefill: ErrorCode.NODE_LOST,
    stop_decode: ErrorCode.SHUTTING_DOWN,
    fail_decode: ErrorCode.INTERNAL,
    be_late: ErrorCode.DEADLINE_EXCEEDED,
}


@pytest.mark.parametrize("num_steps", range(1, 8))
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_both_nodes_report_the_same_error_code(cause: Callable[[LocalCluster], None], num_steps: int) -> None:
    cluster = SlowGateway()
    cluster.submit("a", prompt_of(64), sampling(1000), timeout_s=1.0)
    for _ in range(num_steps):
        cluster.step()
    cause(cluster)
    cluster.settle(20)
    assert {failure.code for failure in cluster.failures} <= {CAUSES[cause]}
    for member in cluster.members:
        LocalCluster.tell(cluster, member, Abort("a", 0))
    cluster.settle()
    assert cluster.failures or num_steps == 7, "neither node reported the end of the request"
    assert_all_pages_are_released(cluster)


@pytest.mark.parametrize("num_steps", range(1, 8))
@pytest.mark.parametrize(
    ("code", "reported"),
    [(ErrorCode.SHUTTING_DOWN, ErrorCode.TRANSFER_FAILED), (ErrorCode.INTERNAL, ErrorCode.NODE_LOST)],
)
def test_a_decode_node_never_says_that_it_ends_because_its_prefill_node_does(
    code: ErrorCode, reported: ErrorCode, num_steps: int
) -> None:
    cluster = SlowGateway()
    cluster.submit("a", prompt_of(64), sampling(1000))
    for _ in range(num_steps):
        cluster.step()
    cluster.prefill[0].role.stop("the node ends", cluster.clock.now(), code)
    cluster.settle(20)
    assert {failure.code for failure in cluster.failures_of(cluster.prefill[0].name)} <= {code}
    assert {failure.code for failure in cluster.failures_of(cluster.decode[0].name)} <= {reported}
    assert cluster.failures or num_steps == 7, "neither node reported the end of the request"


def test_both_nodes_refuse_a_prompt_larger_than_the_prefill_pool() -> None:
    cluster = SlowGateway(page_size=4, prefill_pages=10)
    cluster.submit("small", prompt_of(20), sampling(3))
    cluster.run()
    cluster.submit("large", prompt_of(41), sampling(3))
    cluster.settle()
    assert len(cluster.failures) == 2
    assert {failure.code for failure in cluster.failures} == {ErrorCode.POOL_TOO_SMALL}
    assert all("--max-total-tokens" in failure.message for failure in cluster.failures)
    assert_all_pages_are_released(cluster)
