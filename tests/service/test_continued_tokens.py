"""An output that is stopped and continued elsewhere equals the undisturbed one, with the small model of the repository.

Tokens are equal in float32, and log-probabilities but for rounding, whatever sampling depends on: seed and position,
penalties, a grammar, reasoning, a minimum length, forbidden words.
"""

from collections.abc import Iterator

import pytest
from support.cluster.local_cluster import Answer, LocalCluster, assert_all_pages_are_released
from support.service.service import SMALL_MODEL

from common.sampling_params import SamplingParams, Thinking
from common.wire.messages import Flush

PROMPT = tuple(range(300, 340))
MAX_NEW = 24
PAGE_SIZE = 16
GREEDY = SamplingParams(max_new_tokens=MAX_NEW, temperature=0.0, min_tokens=MAX_NEW, logprobs=2)
SEEDED = GREEDY._replace(temperature=0.9, top_k=50, top_p=0.95, seed=2**63 + 5)
GRAMMAR = r"start: /[a-z ]{200,300}\./"
CASES = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": SEEDED._replace(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "grammar": SEEDED._replace(grammar=GRAMMAR, min_tokens=0),
    "thinking": SEEDED._replace(grammar=GRAMMAR, min_tokens=0, thinking=Thinking(None, 71, 10)),
    "min_tokens": SEEDED._replace(min_tokens=18, stop_token_ids=tuple(range(0, 1_000, 3))),
    "bad_words": GREEDY,  # the first words of its own undisturbed output are forbidden
}
#: Tokens of the earlier attempt: 8 fill the prompt's last page.
CUTS = (1, 2, 8, 17)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    made = LocalCluster(SMALL_MODEL, num_prefill=2, num_decode=2, page_size=PAGE_SIZE, chunk_tokens=32, latency=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def small() -> Iterator[LocalCluster]:
    """Nodes without a radix cache whose pools are too small for two requests."""
    made = LocalCluster(
        SMALL_MODEL, num_prefill=2, num_decode=2, page_size=PAGE_SIZE, decode_pages=6, latency=1, is_cached=False,
        reserved_tokens=0, resume_tokens=8,
    )  # fmt: skip
    yield made
    made.close()


def undisturbed(cluster: LocalCluster, params: SamplingParams) -> Answer:
    answer = cluster.submit(f"undisturbed {len(cluster.answers)}", PROMPT, params)
    cluster.run()
    flush(cluster)
    return answer


def flush(cluster: LocalCluster) -> None:
    """Forget every page, so that each attempt computes or receives its own."""
    cluster.settle()
    for member in cluster.members:
        member.role.on_gateway(Flush(), cluster.clock.now())
        member.role.outbox.gateway.clear()


def params_of(cluster: LocalCluster, name: str) -> SamplingParams:
    params = CASES[name]
    if name == "bad_words":
        output = undisturbed(cluster, params).output
        params = params._replace(bad_words=(output[1:3], output[6:9], output[12:13]))
    return params


def cut(cluster: LocalCluster, rid: str, num_tokens: int) -> None:
    answer = cluster.answers[rid]
    while len(answer.tokens) < num_tokens:
        assert not answer.is_over
        cluster.step()
    for kept in (answer.tokens, answer.logprobs):
        for index in [index for index in kept if index >= num_tokens]:
            del kept[index]


def assert_equal(answer: Answer, expected: Answer) -> None:
    assert answer.error is None
    assert answer.output == expected.output
    assert answer.finish == expected.finish
    assert len(answer.logprobs) == len(expected.logprobs)
    for index, found in answer.logprobs.items():
        wanted = expected.logprobs[index]
        assert found is not None and wanted is not None
        assert found.token == pytest.approx(wanted.token, abs=1e-4)
        assert [token for token, _ in found.top] == [token for token, _ in wanted.top]


@pytest.mark.slow(sample=0.15)
@pytest.mark.parametrize("pair", [(1, 1), (None, 1)], ids=["both nodes", "decode node alone"])
@pytest.mark.parametrize("name", CASES)
def test_a_continued_output_equals_the_undisturbed_one(
    cluster: LocalCluster, name: str, pair: tuple[int | None, int]
) -> None:
    params = params_of(cluster, name)
    expected = undisturbed(cluster, params)
    assert len(expected.output) > CUTS[-1]
    for num_tokens in CUTS:
        rid = f"cut {len(cluster.answers)}"
        answer = cluster.submit(rid, PROMPT, params)
        cut(cluster, rid, num_tokens)
        cluster.continue_request(rid, pair=pair)
        cluster.run()
        assert_equal(answer, expected)
        flush(cluster)
    assert_all_pages_are_released(cluster)


@pytest.mark.slow(sample=0.15)
@pytest.mark.parametrize("name", CASES)
def test_a_continued_output_that_is_retracted_equals_the_undisturbed_one(small: LocalCluster, name: str) -> None:
    params = params_of(small, name)
    expected = undisturbed(small, params)
    before = small.counters(small.decode[1])["retractions"]
    rids = [f"cut {len(small.answers)} {number}" for number in range(2)]
    for rid, num_tokens in zip(rids, (3, 5), strict=True):
        output = expected.output[:num_tokens]
        answer = small.submit(rid, PROMPT, params, pair=(1, 1), output=output)
        answer.tokens.update(enumerate(output))
        answer.logprobs.update({index: expected.logprobs[index] for index in range(num_tokens)})
    small.run()
    for rid in rids:
        assert_equal(small.answers[rid], expected)
    assert small.counters(small.decode[1])["retractions"] > before
    small.settle()
    assert_all_pages_are_released(small)
