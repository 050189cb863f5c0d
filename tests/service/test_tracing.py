"""Where real nodes spend the time of a request, as a timeline, as a trace, and at a collector."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.gateway.otlp_collector import ReceivedSpan, collector
from support.service.client import Client, prompt_of
from support.service.service import running

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STAGES = ["decode_queue", "prefill_wait", "transfer", "batch_join", "decode"]


async def get(client: Client, path: str) -> Any:
    async with client.session.get(path) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def test_the_stages_of_a_request_on_both_nodes_are_in_its_timeline_and_at_the_collector(tmp_path: Path) -> None:
    options = {"prefill-0": {"chunked_prefill_size": 64}}
    async with collector() as collected:
        with running(tmp_path, gateway_options={"otlp_endpoint": collected.url}, only=options) as service:
            async with service.client() as client:
                body = {"input_ids": prompt_of(200, 3), "rid": "a", "sampling_params": {"max_new_tokens": 12}}
                headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
                async with client.session.post("/generate", json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    meta = (await answer.json())["meta_info"]
                shown = await get(client, "/v1/requests/a/timeline")
                trace = await get(client, "/v1/trace?seconds=600")
                spans = await collected.until(lambda spans: any(span.name == "decode" for span in spans))
    check_timeline(shown, meta)
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"} == {
        "gateway", "prefill-0", "decode-0",
    }  # fmt: skip
    check_exported(spans)


def check_timeline(shown: dict[str, Any], meta: dict[str, Any]) -> None:
    assert (shown["trace_id"], shown["prefill"], shown["decode"]) == (TRACE, "prefill-0", "decode-0")
    spans: dict[str, dict[str, Any]] = {
        span["name"]: span for span in shown["spans"] if span["name"] != "prefill_chunk"
    }
    assert sorted(spans) == sorted(["queue", "prefill_queue", "prefill", *STAGES])
    chunks = [span for span in shown["spans"] if span["name"] == "prefill_chunk"]
    assert [chunk["attributes"]["num_tokens"] for chunk in chunks] == [64, 64, 64, 8]
    assert spans["prefill"]["attributes"] == {"num_tokens": 200}
    assert spans["transfer"]["attributes"] == {"num_pages": 13}
    assert spans["decode"]["attributes"] == {"num_tokens": meta["completion_tokens"]}
    for before, after in itertools.pairwise(STAGES):
        end_s = spans[before]["start_s"] + spans[before]["duration_s"]
        assert spans[after]["start_s"] == pytest.approx(end_s, abs=1e-6)
    assert spans["prefill"]["duration_s"] == pytest.approx(meta["timings"]["prefill_s"], abs=1e-6)
    for name, clock in shown["clocks"].items():
        assert abs(clock["offset_s"]) <= clock["error_s"] + 1e-6, "the processes of one machine have one clock"
        for span in (span for span in shown["spans"] if span["process"] == name):
            assert span["start_s"] >= -2 * clock["error_s"] - 1e-6
            assert span["start_s"] + span["duration_s"] <= shown["duration_s"] + 2 * clock["error_s"] + 1e-6


def check_exported(spans: list[ReceivedSpan]) -> None:
    by_name = {span.name: span for span in spans}
    root = by_name["text_completion m"]
    assert (root.trace_id, root.parent_id, root.service) == (TRACE, PARENT, "baton-gateway")
    assert {span.parent_id for span in spans if span.name == "prefill_chunk"} == {by_name["prefill"].span_id}
    assert {by_name[stage].service for stage in STAGES} == {"baton-decode"}
    assert by_name["decode"].instance == "decode-0"
    assert all(span.start_ns <= span.end_ns for span in spans)


async def test_an_aborted_request_shows_where_it_was(tmp_path: Path) -> None:
    with running(tmp_path, gateway_options={"retry_grace": 0}) as service:
        async with service.client() as client:
            exchange = client.begin(prompt_of(40, 5), 2_000, rid="a")
            await exchange.has(5)
            (listed,) = (await get(client, "/v1/requests"))["requests"]
            assert (listed["rid"], listed["status"]) == ("a", "running")
            running_spans = {span["name"] for span in (await get(client, "/v1/requests/a/timeline"))["spans"]}
            assert running_spans >= {"queue", "prefill", "transfer", "batch_join"}
            await exchange.leave()
            await client.settled()
            shown = await get(client, "/v1/requests/a/timeline")
    assert shown["status"] == "aborted"
    assert {span["name"] for span in shown["spans"]} >= {"prefill", "transfer", "batch_join", "decode"}
