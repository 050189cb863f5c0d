"""Dashboards against the live ``/metrics`` of a service: our own, and those made for vLLM and SGLang."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from support.service.client import Client
from support.service.promql import Labels, has_data, selectors, series_of
from support.service.service import Service, running

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "deploy" / "grafana" / "baton.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]

#: The samples that vLLM's Grafana boards query, and the labels that they select or group by.
VLLM_BOARDS = {
    **{
        f"vllm:{name}_{part}": {"model_name", *(["le"] if part == "bucket" else [])}
        for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
        for part in ("bucket", "sum", "count")
    },
    "vllm:time_per_output_token_seconds_bucket": {"model_name", "le"},
    "vllm:time_per_output_token_seconds_sum": {"model_name"},
    "vllm:time_per_output_token_seconds_count": {"model_name"},
    "vllm:prompt_tokens_total": {"model_name"},
    "vllm:generation_tokens_total": {"model_name"},
    "vllm:num_requests_running": {"model_name"},
    "vllm:num_requests_waiting": {"model_name"},
    "vllm:kv_cache_usage_perc": {"model_name"},
    "vllm:request_prompt_tokens_bucket": {"model_name", "le"},
    "vllm:request_generation_tokens_bucket": {"model_name", "le"},
    "vllm:request_success_total": {"model_name", "finished_reason"},
    "vllm:request_queue_time_seconds_sum": {"model_name"},
    "vllm:request_prefill_time_seconds_sum": {"model_name"},
    "vllm:request_decode_time_seconds_sum": {"model_name"},
    "vllm:request_max_num_generation_tokens_sum": {"model_name"},
    "vllm:prefix_cache_queries_total": {"model_name", "engine"},
    "vllm:prefix_cache_hits_total": {"model_name", "engine"},
    "vllm:iteration_tokens_total_bucket": {"model_name", "le"},
    "vllm:num_preemptions_total": {"model_name"},
}
#: Likewise for SGLang's.
SGLANG_BOARD = {
    **{
        f"sglang:{name}_{part}": {"model_name", *(["le"] if part == "bucket" else [])}
        for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds")
        for part in ("bucket", "sum", "count")
    },
    "sglang:inter_token_latency_seconds_bucket": {"model_name", "le"},
    "sglang:num_running_reqs": {"model_name"},
    "sglang:gen_throughput": {"model_name"},
    "sglang:cache_hit_rate": {"model_name"},
    "sglang:token_usage": {"model_name"},
    "sglang:num_queue_reqs": {"model_name"},
}
#: Their samples that stay 0 in a service that has been idle for a moment, or that has room for all.
MAY_BE_ZERO = re.compile(r"num_|usage|throughput|hit|preemptions")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("dashboards"), decode=2, node_options={"transport": "tcp"}) as service:
        yield service


@pytest.fixture
async def client(service: Service) -> AsyncIterator[Client]:
    async with service.client() as client:
        yield client


async def text_of(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as answer:
        assert answer.status == 200
        return await answer.text()


async def scrapes(client: Client) -> dict[str, str]:
    """The texts of ``/metrics`` by node, and of the gateway, all from after this call."""
    rows = await client.fresh()
    texts = {name: await text_of(client.session, f"http://{row['http_address']}/metrics") for name, row in rows.items()}
    return {**texts, "gateway": await text_of(client.session, "/metrics")}


async def used(client: Client) -> dict[str, str]:
    """Scrapes of a service that has answered requests, refused one and ended one with an error."""
    for _ in range(2):
        await client.generate(range(100, 140), 6)
    assert (await client.post("/v1/completions", {"model": "nowhere", "prompt": "a"}))[0] == 404
    assert (await client.post("/v1/completions", {"prompt": "a", "max_tokens": 100, "deadline_ms": 1}))[0] == 504
    return await scrapes(client)


@pytest.mark.parametrize("kind", ["gateway and nodes", "gateway alone"])
async def test_every_query_of_our_board_has_data(client: Client, kind: str) -> None:
    texts = await used(client)
    series = series_of(*(texts.values() if kind == "gateway and nodes" else [texts["gateway"]]))
    missing = [
        (title, selector.name)
        for title, target in QUERIES
        for selector in selectors(target["expr"])
        if not has_data(selector, series)
    ]
    if kind == "gateway and nodes":
        assert not missing
    else:  # what only nodes have says so
        assert {title for title, _ in missing} == {"Time of a step", "Batch size"}
        told = [panel["description"] for panel in PANELS if panel["title"] in ("Time of a step", "Batch size")]
        assert all(text.endswith("From the nodes' own /metrics.") for text in told)


def test_every_legend_of_our_board_uses_labels_of_its_query() -> None:
    for title, target in QUERIES:
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert all(shown <= one.labels for one in selectors(target["expr"])), title


def test_a_node_that_several_gateways_show_is_counted_once() -> None:
    for title, target in QUERIES:
        for name in re.findall(r"baton_nodes|baton_node_(?!step)\w+", target["expr"]):
            assert re.search(rf"max by \([a-z, ]+\) \((rate\()?{name}{{", target["expr"]), title


def test_panels_of_our_board_do_not_overlap_and_variables_are_defined() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) is panel["title"]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    names = {variable["name"] for variable in BOARD["templating"]["list"]} | {"__rate_interval"}
    assert {name for _, target in QUERIES for name in re.findall(r"\$(\w+)", target["expr"])} <= names


@pytest.mark.parametrize("board", [VLLM_BOARDS, SGLANG_BOARD], ids=["vLLM", "SGLang"])
async def test_boards_made_for_others_show_our_nodes(client: Client, board: dict[str, set[str]]) -> None:
    texts = await used(client)
    nodes = [text for name, text in texts.items() if name != "gateway"]
    series, values = series_of(*nodes), sums_of(*nodes)
    for name, labels in board.items():
        assert any(labels <= found.keys() for found in series.get(name, ())), name
        assert {found["model_name"] for found in series[name]} == {"m"}
        assert MAY_BE_ZERO.search(name) or values[name] > 0, name
    assert not {name for name in series_of(texts["gateway"]) if ":" in name}, "the gateway would count twice"


async def test_each_event_is_counted_on_one_node(client: Client) -> None:
    await client.settled()  # requests of other tests that were aborted have ended
    before = sums_of(*(await scrapes(client)).values())
    for max_new in (1, 5):
        await client.generate(range(200, 233), max_new)
    after = sums_of(*(await scrapes(client)).values())
    moved = {name: value - before.get(name, 0.0) for name, value in after.items()}
    for name, expected in (
        ("vllm:prompt_tokens_total", 66), ("vllm:generation_tokens_total", 6), ("vllm:request_success_total", 2),
        ("vllm:time_to_first_token_seconds_count", 2), ("vllm:inter_token_latency_seconds_count", 4),
        ("vllm:e2e_request_latency_seconds_count", 2), ("vllm:request_queue_time_seconds_count", 2),
        ("vllm:request_prefill_time_seconds_count", 2), ("vllm:request_decode_time_seconds_count", 2),
        ("vllm:request_prompt_tokens_sum", 66), ("vllm:request_generation_tokens_sum", 6),
        ("vllm:request_params_max_tokens_sum", 6), ("sglang:num_requests_total", 2),
    ):  # fmt: skip
        assert moved[name] == expected, name


def sums_of(*texts: str) -> dict[str, float]:
    """The sum of all samples of each name."""
    found: dict[str, float] = {}
    for line in "".join(texts).splitlines():
        if not line.startswith("#"):
            sample, value = line.rsplit(" ", 1)
            name = sample.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def test_a_node_and_the_gateway_say_the_same_of_it(client: Client) -> None:
    """Nothing happens meanwhile, so that all totals stay, except those of control messages, which are heartbeats."""
    await client.settled()
    texts = await scrapes(client)

    def own(text: str) -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("baton_node_")]
        return {
            name: float(value)
            for name, value in lines
            if 'node="prefill-0"' in name and "node_step_" not in name and "control_bytes" not in name
        }

    assert own(texts["gateway"]) == own(texts["prefill-0"]) != {}


async def test_the_help_of_every_series_of_nodes_says_what_it_is(client: Client) -> None:
    texts = await used(client)
    helps = [line for text in texts.values() for line in text.splitlines() if line.startswith("# HELP baton_node_")]
    assert len(helps) > 100
    assert not [line for line in helps if line.endswith("does not know.")]


async def test_prometheus_finds_the_nodes_and_loses_those_that_are_gone(client: Client, service: Service) -> None:
    async def targets() -> dict[str, Labels]:
        async with client.session.get("/v1/workers/targets") as answer:
            assert answer.content_type == "application/json"
            return {group["labels"]["node"]: group for group in await answer.json()}

    rows = await client.workers()
    assert await targets() == {
        name: {
            "targets": [row["http_address"]],
            "labels": {"node": name, "role": row["role"], "model": "m"},
        }
        for name, row in rows.items()
    }
    service.stop("decode-1")
    while (await targets()).keys() != {"prefill-0", "decode-0"}:  # until the test's limit of time
        await asyncio.sleep(0.05)


def test_the_scrape_example_asks_the_gateway_for_the_nodes() -> None:
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (gateway,) = jobs["baton-gateway"]["static_configs"][0]["targets"]
    assert jobs["baton-nodes"]["http_sd_configs"][0]["url"] == f"http://{gateway}/v1/workers/targets"
