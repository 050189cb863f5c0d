"""LoRA adapters through a whole service: prefill on one node and decode on another give the merged models' tokens."""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.cluster.local_cluster import LocalCluster
from support.engine.lora_adapters import make_adapter, merge
from support.engine.reference_models import draw_prompts, generate, load_reference, make_model
from support.service.client import Client
from support.service.service import SMALL_MODEL, running

from common.errors import ErrorCode
from common.sampling_params import SamplingParams

LENGTHS, MAX_NEW = [2, 17, 64, 100], 10
GREEDY = SamplingParams(max_new_tokens=MAX_NEW, temperature=0.0)
#: Adapters by id; two have the same content under two names.
SETTINGS: dict[str, dict[str, Any]] = {
    "a@1": {"seed": 1},
    "b@2": {"seed": 2, "rank": 4, "alpha": 10, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
    "c@1": {"seed": 1},
}


class Case(NamedTuple):
    adapter: str
    prompt: tuple[int, ...]
    expected: tuple[int, ...]


class Merged(NamedTuple):
    model: Path
    adapters: dict[str, Path]
    cases: list[Case]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Merged:
    """A random model, adapters, and the outputs of the merged models for the same prompts."""
    root = tmp_path_factory.mktemp("lora")
    model = make_model(root / "model", seed=3)
    adapters = {name: make_adapter(root / name, model, **some) for name, some in SETTINGS.items()}
    models = {"": load_reference(model)}
    models |= {name: load_reference(merge(root / f"merged-{name}", model, folder)) for name, folder in adapters.items()}
    cases: list[Case] = []
    for length in LENGTHS:
        for seed in range(100):
            ((prompt, _),) = draw_prompts(models[""], [length], MAX_NEW, seed=100 * length + seed)
            outputs = {name: generate(one, prompt, MAX_NEW) for name, one in models.items()}
            if all(outputs.values()):
                cases += [Case(name, prompt, output) for name, output in outputs.items() if output]
                break
    assert len(cases) == len(LENGTHS) * len(models)
    assert len({case.expected for case in cases if len(case.prompt) == LENGTHS[-1]}) == 3
    return Merged(model, adapters, cases)


def salt_of(case: Case) -> str:
    """As the gateway makes it."""
    return f"\0{case.adapter}\0" if case.adapter else ""


def serve(cluster: LocalCluster, cases: list[Case], tag: str, *, num_nodes: int = 1) -> None:
    for number, case in enumerate(cases):
        pair = (number % num_nodes, number // num_nodes % num_nodes)
        cluster.submit(f"{tag}{number}", case.prompt, GREEDY, pair=pair, salt=salt_of(case), adapter=case.adapter)
    cluster.run()
    for number, case in enumerate(cases):
        answer = cluster.answers[f"{tag}{number}"]
        assert answer.error is None
        assert answer.output == case.expected, (case.adapter, len(case.prompt))
    cluster.settle()


@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_adapters_and_the_model_in_one_batch_equal_the_merged_models_cold_and_cached(
    merged: Merged, chunk_tokens: int | None
) -> None:
    cluster = LocalCluster(
        merged.model, adapters=merged.adapters, chunk_tokens=chunk_tokens, prefill_pages=300, decode_pages=300,
        max_running=16, latency=1,
    )  # fmt: skip
    serve(cluster, merged.cases, "cold")
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    num_prompt = sum(len(case.prompt) for case in merged.cases)
    assert cluster.counters(prefill)["prompt_tokens_computed"] == num_prompt, "a prompt used the cache of another model"
    assert cluster.counters(decode)["pages_cached"] == 0
    serve(cluster, merged.cases, "cached")
    assert cluster.counters(decode)["pages_cached"] == sum(len(case.prompt) // 16 for case in merged.cases)
    cluster.close()


def test_any_pair_of_nodes_gives_the_same_tokens(merged: Merged) -> None:
    cluster = LocalCluster(merged.model, adapters=merged.adapters, num_prefill=2, num_decode=2, latency=2)
    serve(cluster, merged.cases, "r", num_nodes=2)
    cluster.close()


@pytest.mark.parametrize("resume_tokens", [None, 8])
def test_retraction_in_a_tiny_pool_changes_no_token(merged: Merged, resume_tokens: int | None) -> None:
    """Retracted requests are computed again on the decode node, or on their prefill node."""
    cluster = LocalCluster(
        merged.model, adapters=merged.adapters, page_size=4, chunk_tokens=16, decode_pages=40, latency=1,
        reserved_tokens=0, is_cached=False, resume_tokens=resume_tokens,
    )  # fmt: skip
    serve(cluster, merged.cases * 2, "r")
    assert cluster.counters(cluster.decode[0])["retractions"] > 0
    assert (cluster.counters(cluster.prefill[0])["resumes"] > 0) == (resume_tokens is not None)
    cluster.close()


def test_requests_that_move_or_continue_elsewhere_keep_their_adapter(merged: Merged) -> None:
    cluster = LocalCluster(merged.model, adapters=merged.adapters, num_prefill=2, num_decode=2, latency=1)
    for how in ("move", "continue"):
        for number, case in enumerate(merged.cases):
            answer = cluster.submit(f"{how}{number}", case.prompt, GREEDY, salt=salt_of(case), adapter=case.adapter)
            cluster.run_until(f"{how}{number}", 4)
            if how == "move":
                cluster.move(f"{how}{number}", 1)
            else:
                cluster.continue_request(f"{how}{number}", pair=(1, 1))
            cluster.run()
            assert answer.error is None
            assert answer.output == case.expected
        cluster.settle()
    cluster.close()


def test_a_request_for_an_adapter_that_a_node_lacks_fails_and_leaves_nothing(merged: Merged) -> None:
    cluster = LocalCluster(merged.model, adapters=merged.adapters)
    answer = cluster.submit("r", (1, 2, 3), GREEDY, adapter="other@3")
    cluster.run()
    assert answer.error is not None
    assert answer.error.code is ErrorCode.MODEL_NOT_FOUND
    cluster.settle()
    cluster.close()


# ---- real processes --------------------------------------------------------------------------------------------------


async def ask(client: Client, model: str, prompt: tuple[int, ...]) -> dict[str, Any]:
    """Ask for as many tokens as the reference has made, which are no end tokens."""
    return await client.generate(prompt, MAX_NEW, model=model, ignore_eos=False, min_new_tokens=MAX_NEW)


async def model_names(client: Client) -> list[str]:
    async with client.session.get("/v1/models") as answer:
        return [model["id"] for model in (await answer.json())["data"]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """A folder of adapters for the small model, and prompts with the merged models' outputs."""
    root = tmp_path_factory.mktemp("small-lora")
    known = {"m": draw_prompts(SMALL_MODEL, [40, 100], MAX_NEW, seed=1)}
    for seed, name in enumerate(("one", "two")):
        folder = make_adapter(root / "loras" / name, SMALL_MODEL, seed=seed, rank=4)
        known[name] = draw_prompts(merge(root / f"merged-{name}", SMALL_MODEL, folder), [40, 100], MAX_NEW, seed=1)
    return root / "loras", known


@pytest.mark.parametrize("model_impl", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
async def test_adapters_given_at_start_and_loaded_live_equal_the_merged_models(
    tmp_path: Path, small: tuple[Path, dict[str, list[Any]]], model_impl: str
) -> None:
    folder, known = small
    options = {"lora": f"one={folder / 'one'}", "lora_dir": folder, "model_impl": model_impl}
    load = {"lora_name": "two", "lora_path": "two"}
    with running(tmp_path, node_options=options) as service:
        async with service.client() as client:
            status, answer = await client.post("/v1/load_lora_adapter", {**load, "lora_path": "../m"})
            assert status == 400
            assert "is not below --lora-dir" in answer["error"]["message"]
            status, answer = await client.post("/v1/load_lora_adapter", load)
            assert (status, [node["error"] for node in answer["nodes"]]) == (200, ["", ""])
            for has_cache in (False, True):
                asked = [(name, *case) for name, cases in known.items() for case in cases]
                answers = await asyncio.gather(*(ask(client, name, prompt) for name, prompt, _ in asked))
                assert [tuple(answer["output_ids"]) for answer in answers] == [expected for *_, expected in asked]
                assert all((answer["meta_info"]["cached_tokens"] > 0) == has_cache for answer in answers)

            service.kill("decode-0")
            service.start("decode-0")
            service.wait_until_ready()
            prompt, expected = known["two"][0]
            while (await client.post("/v1/completions", {"model": "two", "prompt": [1], "max_tokens": 1}))[0] == 503:
                await asyncio.sleep(0.05)  # the gateway has the node load it again
            assert tuple((await ask(client, "two", prompt))["output_ids"]) == expected

            running_request = client.begin(prompt, 300, model="two")
            await running_request.has(1)
            status, _ = await client.post("/v1/unload_lora_adapter", {"lora_name": "two"})
            assert status == 200
            assert len((await running_request.end()).ids) == 300
            status, answer = await client.post("/v1/completions", {"model": "two", "prompt": [1]})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            await client.settled()


async def test_a_node_without_an_adapter_that_the_other_has_serves_the_model_alone(
    tmp_path: Path, small: tuple[Path, dict[str, list[Any]]]
) -> None:
    folder, known = small
    with running(tmp_path, only={"prefill-0": {"lora": f"one={folder / 'one'}"}}) as service:
        async with service.client() as client:
            prompt, expected = known["m"][0]
            assert tuple((await ask(client, "m", prompt))["output_ids"]) == expected
            status, answer = await client.post("/v1/completions", {"model": "one", "prompt": [1]})
            assert (status, answer["error"]["code"]) == (503, "no_route")


async def test_every_gateway_of_a_node_serves_what_one_of_them_has_loaded(
    tmp_path: Path, small: tuple[Path, dict[str, list[Any]]]
) -> None:
    folder, known = small
    prompt, expected = known["two"][0]
    body = {"model": "two", "prompt": [1], "max_tokens": 1}
    with running(tmp_path, gateways=2, node_options={"lora_dir": folder}) as service:
        async with service.client() as first, service.client("gateway-1") as second:
            load = {"lora_name": "two", "lora_path": str(folder / "two")}
            assert (await first.post("/v1/load_lora_adapter", load))[0] == 200
            while (await second.post("/v1/completions", body))[0] != 200:
                await asyncio.sleep(0.02)
            for client in (first, second):
                assert tuple((await ask(client, "two", prompt))["output_ids"]) == expected
            assert (await second.post("/v1/unload_lora_adapter", {"lora_name": "two"}))[0] == 200
            while (await first.post("/v1/completions", body))[0] != 404:
                await asyncio.sleep(0.02)


async def test_an_unload_through_one_gateway_loses_no_request_that_waits_at_another_one(
    tmp_path: Path, small: tuple[Path, dict[str, list[Any]]]
) -> None:
    folder, known = small
    prompt, _ = known["two"][0]
    options = {"lora_dir": folder, "max_running_requests": 2}
    with running(tmp_path, gateways=2, node_options=options) as service:
        async with service.client() as first, service.client("gateway-1") as second:
            load = {"lora_name": "two", "lora_path": "two"}
            assert (await first.post("/v1/load_lora_adapter", load))[0] == 200
            while (await second.post("/v1/completions", {"model": "two", "prompt": [1], "max_tokens": 1}))[0] != 200:
                await asyncio.sleep(0.02)
            lengths = [3000, 100, 20, 20, 20]  # the first two take the slots
            waiting = [second.begin(prompt, length, model="two") for length in lengths]
            await waiting[0].has(1)
            unload = asyncio.ensure_future(first.post("/v1/unload_lora_adapter", {"lora_name": "two"}))
            while "two" in await model_names(second):
                await asyncio.sleep(0.02)
            assert not unload.done(), "the requests of the other gateway hold the adapter"
            assert [len((await one.end()).ids) for one in waiting[1:]] == lengths[1:]
            await waiting[0].goes_on()
            assert (await unload)[0] == 200
            await second.settled()


async def test_a_gateway_that_starts_again_has_a_node_load_what_the_other_nodes_have(
    tmp_path: Path, small: tuple[Path, dict[str, list[Any]]]
) -> None:
    folder, known = small
    prompt, expected = known["two"][0]
    with running(tmp_path, node_options={"lora_dir": folder}) as service:
        async with service.client() as client:
            load = {"lora_name": "two", "lora_path": "two"}
            assert (await client.post("/v1/load_lora_adapter", load))[0] == 200
        service.kill("gateway", "decode-0")
        service.start("gateway", "decode-0")
        service.wait_until_ready()
        async with service.client() as client:
            while (await client.post("/v1/completions", {"model": "two", "prompt": [1], "max_tokens": 1}))[0] != 200:
                await asyncio.sleep(0.05)
            assert tuple((await ask(client, "two", prompt))["output_ids"]) == expected
            assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "two"}))[0] == 200
        service.kill("gateway", "decode-0")
        service.start("gateway", "decode-0")
        service.wait_until_ready()
        async with service.client() as client:
            assert (await client.post("/v1/completions", {"model": "two", "prompt": [1]}))[0] == 404
