"""Nodes that are lost, fail, start and answer at random: every stream gets its tokens once, or a fair error."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.gateway.played_cluster import PlayedCluster, output_of

from common.errors import ErrorCode
from common.sampling_params import TokenLogprobs
from common.wire.messages import Tokens
from common.wire.packed_logprobs import pack_logprobs

FAILURES_OF_LIVING_NODES = (ErrorCode.TRANSFER_FAILED, ErrorCode.QUEUE_FULL, ErrorCode.ABORTED)
EVENTS = st.one_of(
    st.tuples(st.just("come"), st.integers(1, 12)),
    st.tuples(
        st.sampled_from(
            ["prefill", "prefill", "decode", "decode", "arrive", "arrive", "lose", "start", "late", "wrong", "wait"]
        ),
        st.integers(0, 99),
    ),
    st.tuples(
        st.sampled_from([*FAILURES_OF_LIVING_NODES, ErrorCode.SHUTTING_DOWN, ErrorCode.INTERNAL]),
        st.integers(0, 99),
    ),
)


class RandomHistory:
    """Performs events on a cluster; each that makes no sense now does nothing."""

    def __init__(self):
        self.cluster = PlayedCluster(recovery_timeout=1e6)
        self.streams = []
        self.old = []  # work of lost nodes, which may go on unaware
        self.delayed = []  # prefill nodes and messages whose first token is under way
        self.next_index = {}  # of a computed prompt, by rid and attempt: the token that the decode node sends next

    def perform(self, kind, number):
        cluster = self.cluster
        work = [(node, message) for node in cluster.work for message in cluster.work[node]]
        if kind == "come" and cluster.pool.registry.is_ready:
            rid, prompt = f"r{len(self.streams)}", (len(self.streams), 3)
            self.streams.append(cluster.come(rid, prompt=prompt, max_new=number, prompt_logprobs_from=1))
        elif kind == "start":
            names = {cluster.names[node] for node in cluster.work}
            names = [f"{role}-{i}" for role in ("prefill", "decode") for i in range(2) if f"{role}-{i}" not in names]
            for name in names[number % 4 :][:1]:
                cluster.start(name.partition("-")[0], name)
        elif kind == "lose":
            for node in list(cluster.work)[number % 4 :][:1]:
                self.old += [one for one in work if one[0] == node]
                self.delayed = [one for one in self.delayed if one[0] != node]
                cluster.lose(node)
        elif kind == "wait":
            cluster.wait(number / 20)
        elif kind == "late":
            for node, message in self.old[number % 4 :][:1]:
                cluster.dispatcher.on_tokens(node, Tokens(message.rid, message.attempt, len(message.output), (251,)))
        elif kind == "wrong":
            for node, message in work[number % max(len(work), 1) :][:1]:
                cluster.dispatcher.on_tokens(node, Tokens(message.rid, message.attempt, len(message.output), (-1,)))
                cluster.turn()
        elif kind == "arrive":
            for node, message in self.delayed[:1]:
                self.delayed.remove((node, message))
                cluster.say(node, message, 0)
        elif kind in ("prefill", "decode"):
            works = [one for one in work if cluster.names[one[0]].startswith(kind)]
            for node, message in works[number % max(len(works), 1) :][:1]:
                self.prefilled(node, message) if kind == "prefill" else self.decoded(node, message)
        elif isinstance(kind, ErrorCode):
            for node, message in work[number % max(len(work), 1) :][:1]:
                cluster.fail(node, message.rid, kind)

    def prefilled(self, node, message):
        self.cluster.work[node].remove(message)
        self.next_index[message.rid, message.attempt] = max(len(message.output), 1)
        if not message.output:
            self.delayed.append((node, message))

    def decoded(self, node, message):
        key = (message.rid, message.attempt)
        if message.prefill is None:  # it computes the prompt, too
            self.next_index.setdefault(key, len(message.output))
        if key in self.next_index and self.next_index[key] < message.sampling.max_new_tokens:
            self.next_index[key] += 1
            self.cluster.say(node, message, self.next_index[key] - 1)

    def finish(self):
        """Start what is missing and let everything end."""
        cluster = self.cluster
        for node in list(cluster.work):
            if cluster.pool.registry.workers[node].is_draining:
                cluster.lose(node)
        for _ in range(4):
            self.perform("start", 0)
        for _ in range(500):
            if not cluster.dispatcher.num_in_flight:
                return
            for kind in ("prefill", "decode"):
                for number in range(sum(map(len, cluster.work.values()))):
                    self.perform(kind, number)
            while self.delayed:
                self.perform("arrive", 0)
            cluster.wait(1.0)
        raise AssertionError("requests hang")


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(EVENTS, max_size=120))
def test_random_losses_at_random_moments_give_every_stream_its_tokens(events):
    history = RandomHistory()
    for kind, number in events:
        history.perform(kind, number)
    history.finish()
    for stream in history.streams:
        if stream.error is not None:  # a request that was lost three times without progress
            assert stream.error.code is ErrorCode.NODE_LOST
            assert "the nodes for itself" in stream.error.message
            assert stream.ids == output_of(stream)[: len(stream.ids)]
        else:
            assert stream.ids == output_of(stream)
            assert stream.text == "".join(map(chr, output_of(stream)))
            assert stream.prompt_logprobs == (pack_logprobs(TokenLogprobs(-1.0, ())),)
    history.cluster.check_idle()
