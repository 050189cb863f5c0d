"""Samples, prompt log-probabilities, cache flushes, penalties and local prefill over whole services.

Three services: a node of each role, the same with short prompts prefilled on the decode node, and a decode node alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.service.client import Client, prompt_of
from support.service.service import SMALL_MODEL, Service, running

MODES = {"pair": "never", "short": "auto", "alone": "always"}
THRESHOLD = 40


@pytest.fixture(scope="module", params=list(MODES))
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    mode = MODES[request.param]
    with running(
        tmp_path_factory.mktemp("breadth"),
        prefill=0 if mode == "always" else 1,
        node_options={"chunked_prefill_size": 32, "max_running_requests": 8},
        gateway_options={"local_prefill": mode} | ({"local_prefill_threshold": THRESHOLD} if mode == "auto" else {}),
    ) as service:
        yield service


@pytest.fixture
async def client(service: Service) -> Any:
    async with service.client() as client:
        status, _ = await client.post("/flush_cache", None)
        assert status == 200
        yield client
        await client.settled()


async def completions(client: Client, prompt: Any, **options: Any) -> list[dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, **options}
    status, answer = await client.post("/v1/completions", body)
    assert status == 200, answer
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


async def test_each_sample_can_be_reproduced_alone_by_its_own_seed(client: Client) -> None:
    prompts = [prompt_of(70, 1), prompt_of(5, 2)]
    choices = await completions(client, prompts, n=3, seed=4, temperature=1.0)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4, 5]
    for number, choice in enumerate(choices):
        (single,) = await completions(client, prompts[number // 3], seed=4 + number % 3, temperature=1.0)
        assert single["token_ids"] == choice["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 2


async def test_samples_share_the_whole_pages_of_their_prompt(service: Service, client: Client) -> None:
    before = await client.counters()
    await completions(client, prompt_of(70, 3), n=4, temperature=1.0)  # four whole pages and six tokens
    after = await client.counters()

    def increase(name: str) -> int:
        return int(sum(after[node].get(name, 0) - before[node].get(name, 0) for node in after))

    assert increase("prompt_tokens_computed") == 70 + 3 * 6
    assert increase("pages_sent") == (0 if "prefill-0" not in service.nodes else 5 + 3)


async def test_prompts_below_the_threshold_are_prefilled_on_the_decode_node(service: Service, client: Client) -> None:
    modes = {"never": (1, 1), "auto": (0, 1), "always": (0, 0)}
    num_short, num_long = modes[service._gateway_options["local_prefill"]]
    for length, num_transfers in ((THRESHOLD - 1, num_short), (THRESHOLD, num_long)):
        before = await client.counters()
        await completions(client, prompt_of(length, 100 + length))
        after = await client.counters()
        assert after["decode-0"]["transfers"] - before["decode-0"]["transfers"] == num_transfers
        assert after["decode-0"]["local_prefills"] - before["decode-0"]["local_prefills"] == 1 - num_transfers
        if "prefill-0" in after:
            is_idle = after["prefill-0"]["requests"] == before["prefill-0"]["requests"]
            assert is_idle == (not num_transfers)


async def test_prompt_logprobs_are_equal_cold_and_cached_whole_and_in_chunks(client: Client) -> None:
    prompt = prompt_of(100, 4)
    cold, cached = [(await completions(client, prompt, echo=True, logprobs=2, max_tokens=0))[0] for _ in range(2)]
    values = cold["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert len(values) == 100
    assert cached["logprobs"]["token_logprobs"] == pytest.approx(values, abs=1e-4)
    outer = {"return_logprob": True, "logprob_start_len": 60, "top_logprobs_num": 2}
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, **outer}
    status, answer = await client.post("/generate", body)
    assert status == 200
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == prompt[60:]
    found = [entry[0] for entry in meta["input_token_logprobs"]]
    assert found[0] is None
    assert found[1:] == pytest.approx(values[61:], abs=1e-4)
    assert [len(tops or []) for tops in meta["input_top_logprobs"]] == [0, *[2] * 39]


async def test_a_flushed_cache_is_empty(client: Client) -> None:
    prompt = prompt_of(70, 5)
    for expected in (0, 64, 0):
        answer = await client.generate(prompt, 4)
        assert answer["meta_info"]["cached_tokens"] == expected
        if expected:
            await client.settled()  # no transfer holds pages any more
            status, flushed = await client.post("/flush_cache", None)
            assert status == 200
            assert flushed["num_pages"] >= 4
            assert all(row["num_cached_pages"] == 0 for row in (await client.heartbeats()).values())


async def test_penalties_and_biases_apply_on_both_nodes(client: Client) -> None:
    prompt = prompt_of(50, 6)
    (plain,) = await completions(client, prompt, temperature=0, max_tokens=12)
    banned = {str(token): -100 for token in plain["token_ids"]}
    (other,) = await completions(client, prompt, temperature=0, max_tokens=12, logit_bias=banned)
    assert not set(other["token_ids"]) & set(plain["token_ids"])
    favoured = next(token for token in range(4, 100) if token not in plain["token_ids"])
    (biased,) = await completions(client, prompt, temperature=0, max_tokens=5, logit_bias={str(favoured): 100})
    assert biased["token_ids"] == [favoured] * 5
    (penalised,) = await completions(
        client, prompt, temperature=0, max_tokens=8, logit_bias={str(favoured): 1}, frequency_penalty=2.0
    )
    assert len(set(penalised["token_ids"])) > 1


async def test_one_gateway_serves_nodes_of_two_models(tmp_path: Path) -> None:
    with running(
        tmp_path,
        prefill=0,
        decode=2,
        node_options={"context_length": 300},
        gateway_options={"local_prefill": "always", "also_serve": f"other={SMALL_MODEL}"},
        only={"decode-1": {"served_model_name": "other", "context_length": 200}},
    ) as service:
        async with service.client() as client:
            for model, served_by in ((None, "decode-0"), ("m", "decode-0"), ("other", "decode-1")):
                before = await client.counters()
                await completions(client, prompt_of(10, 7), **({"model": model} if model else {}))
                after = await client.counters()
                changed = [name for name in after if after[name]["requests"] > before[name]["requests"]]
                assert changed == [served_by]
            async with client.session.get("/v1/models") as answer:
                lengths = {model["id"]: model["max_model_len"] for model in (await answer.json())["data"]}
            assert lengths == {"m": 300, "other": 200}
