"""Export over OTLP, against a receiver built on the official protobufs."""

import asyncio
import re
import sys
from typing import Any

import pytest
from support.gateway.fake_nodes import Stack, running, start_request
from support.gateway.otlp_collector import ReceivedSpan, collector

from common.clock import MonotonicClock
from common.errors import ConfigError
from common.sampling_params import SamplingParams
from common.stage_spans import StageSpan
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream, StageReport
from gateway.tracing import otlp
from gateway.tracing.timelines import Timeline
from gateway.tracing.trace_context import TraceContext

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "Rough winds do shake"
SERVER_KIND = 2


@pytest.fixture(autouse=True)
def _is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stop wait for the last export, however busy the machine is."""
    monkeypatch.setattr(otlp, "STOP_S", 60.0)


def body(**changes: Any) -> dict[str, Any]:
    return {"prompt": SECRET, "max_tokens": 3, "temperature": 0.5, "top_p": 0.25, **changes}


async def post(
    stack: Stack, traceparent: str = "", path: str = "/v1/completions", **changes: Any
) -> tuple[int, str, Any]:
    headers = {"traceparent": traceparent} if traceparent else {}
    async with stack.client.post(stack.url + path, json=body(**changes), headers=headers) as answer:
        return answer.status, answer.headers.get("traceparent", ""), await answer.json()


async def test_a_request_is_exported_below_the_span_of_its_client(folder) -> None:
    async with collector() as collected, running(folder, otlp_endpoint=collected.url, trace_sample_rate=0.0) as stack:
        await stack.pair()
        status, answered, answer = await post(stack, f"00-{TRACE}-{PARENT}-01")
        assert status == 200
        spans = {span.name: span for span in await collected.until(lambda spans: len(spans) >= 6)}
    assert spans.keys() == {
        "text_completion tiny", "queue", "prefill_queue", "prefill", "decode_queue", "transfer",
    }  # fmt: skip
    root = spans["text_completion tiny"]
    assert answered == f"00-{TRACE}-{root.span_id}-01"
    assert (root.trace_id, root.parent_id, root.kind, root.is_error) == (TRACE, PARENT, SERVER_KIND, False)
    assert {span.trace_id for span in spans.values()} == {TRACE}
    assert {span.parent_id for span in spans.values() if span is not root} == {root.span_id}
    assert {name: (span.service, span.instance) for name, span in spans.items()} == {
        "text_completion tiny": ("baton-gateway", "gateway"), "queue": ("baton-gateway", "gateway"),
        "prefill_queue": ("baton-prefill", "prefill"), "prefill": ("baton-prefill", "prefill"),
        "decode_queue": ("baton-decode", "decode"), "transfer": ("baton-decode", "decode"),
    }  # fmt: skip
    assert spans["transfer"].end_ns - spans["transfer"].start_ns == pytest.approx(1e9, abs=2)
    times = {name: root.attributes.pop(name) for name in list(root.attributes) if re.search("latency|time_to", name)}
    assert all(seconds >= 0 for seconds in times.values())
    assert times.keys() == {
        "gen_ai.latency.e2e", "gen_ai.latency.time_in_queue", "gen_ai.latency.time_to_first_token",
        "gen_ai.response.time_to_first_chunk",
    }  # fmt: skip
    assert root.attributes == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "baton", "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny", "gen_ai.request.max_tokens": 3, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25, "gen_ai.response.id": answer["id"], "gen_ai.request.id": answer["id"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"], "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": answer["usage"]["prompt_tokens"] // 2,
        "gen_ai.response.finish_reasons": ["length"],
    }  # fmt: skip
    assert SECRET not in repr(spans)


async def test_the_flag_of_the_client_wins_over_the_rate(folder) -> None:
    async with collector() as collected, running(folder, otlp_endpoint=collected.url, trace_sample_rate=1.0) as stack:
        await stack.pair()
        assert (await post(stack, f"00-{TRACE}-{PARENT}-00"))[1].endswith("-00")
        _, answered, answer = await post(stack)
        spans = await collected.until(lambda spans: len(spans) >= 6)
        assert {span.trace_id for span in spans} == {answer["id"].removeprefix("cmpl-")}
        assert {span.parent_id for span in spans if span.kind == SERVER_KIND} == {""}
        assert answered == f"00-{spans[0].trace_id}-{spans[0].span_id}-01"


async def test_without_an_endpoint_a_trace_is_named_but_not_exported(folder) -> None:
    async with running(folder) as stack:
        await stack.pair()
        assert re.fullmatch(
            f"00-{TRACE}-(?!{PARENT})[0-9a-f]{{16}}-01", (await post(stack, f"00-{TRACE}-{PARENT}-01"))[1]
        )
        assert (await post(stack))[1] == ""
        assert (await post(stack, f"00-{TRACE}-{PARENT}-0"))[1] == "", "an invalid header is ignored"
        _, _, answer = await post(stack, f"00-{TRACE}-{PARENT}-01")
        shown = (await stack.get(f"/v1/requests/{answer['id']}/timeline"))[1]
        assert shown["trace_id"] == TRACE


async def test_each_output_of_a_request_has_a_span_of_its_own_in_the_same_trace(folder) -> None:
    async with collector() as collected, running(folder, otlp_endpoint=collected.url) as stack:
        await stack.pair()
        await post(stack, f"00-{TRACE}-{PARENT}-01", n=2)

        def roots(spans: Any) -> list[ReceivedSpan]:
            return [span for span in spans if span.kind == SERVER_KIND]

        spans = await collected.until(lambda spans: len(roots(spans)) == 2)
        assert {(span.trace_id, span.parent_id) for span in roots(spans)} == {(TRACE, PARENT)}
        assert len({span.span_id for span in roots(spans)}) == 2


async def test_an_aborted_request_is_exported_as_an_error_with_the_spans_that_come_late(
    folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "DELAY_S", 3_600.0)  # the stop ends it, after the last spans have come
    async with collector() as collected:
        async with running(folder, otlp_endpoint=collected.url) as stack:
            prefill, _ = await stack.silent_pair()
            call, rid = await start_request(stack)
            await stack.post("/abort_request", {"rid": rid})
            await call
            prefill.spans(rid, StageSpan("prefill_queue", 1.0, 0.5))
            await prefill.round_trip()
        spans = {span.name: span for span in collected.spans}
        root = spans["text_completion tiny"]
        assert root.is_error
        assert root.attributes["error.type"] == "aborted"
        assert "prefill_queue" in spans


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_collector_that_fails_costs_a_counted_drop_and_no_answer(
    folder, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "MAX_WAITING", 4)
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.2)
    async with collector() as collected:
        collected.status = 400
        url = collected.url if is_there else "http://127.0.0.1:9"
        async with running(folder, otlp_endpoint=url) as stack:
            await stack.pair()
            for _ in range(8):
                assert (await post(stack))[0] == 200
            async with asyncio.timeout(60):
                while "baton_traces_dropped_total 8.0" not in await metrics(stack):
                    await asyncio.sleep(0.05)
            assert "baton_traces_exported_total 0.0" in await metrics(stack)


async def metrics(stack: Stack) -> str:
    async with stack.client.get(stack.url + "/metrics") as answer:
        return await answer.text()


async def test_what_waits_is_exported_at_a_stop(folder) -> None:
    async with collector() as collected:
        async with running(folder, otlp_endpoint=collected.url) as stack:
            await stack.pair()
            assert (await post(stack))[0] == 200
        assert len(collected.spans) == 6


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector/other/path", "http://collector/other/path"),
    ],
)
def test_a_path_is_appended_unless_there_is_one(endpoint: str, url: str) -> None:
    assert otlp.traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint", ["collector:4318", "grpc://collector:4317", "http://", "x", "http://[::1", "http://collector:PORT"]
)
def test_what_is_no_url_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint must be a URL"):
        otlp.traces_url(endpoint)


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="set OTEL_EXPORTER_OTLP_HEADERS instead") as caught:
        otlp.traces_url("https://me:secret@collector:4318")
    assert "secret" not in str(caught.value)


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint needs the extra otlp; .* -c constraints.txt '\.\[otlp\]'"):
        otlp.OtlpExporter("http://localhost:4318", MonotonicClock())


def timeline_of(*reports: StageReport) -> Timeline:
    """Of a sampled output, which the node d2 decoded in the end."""
    request = GenerateRequest("a", "a", (1,), SamplingParams(max_new_tokens=1))
    trace = TraceContext(TRACE, PARENT, PARENT, is_sampled=True, operation="chat")
    stream = OutputStream(request, 0, lambda: None, lambda stream: None, 1.0, trace=trace)  # type: ignore[arg-type, return-value]
    stream.decode, stream.finish, stream.ended_at, stream.reports = "d2", "stop", 9.0, [*reports]
    return Timeline.of(stream)


def test_the_spans_of_a_lost_decode_node_are_those_of_a_decode_node() -> None:
    """The output went from d1 to d2, which computed the prompt again."""
    timeline = timeline_of(
        StageReport("p", 0.0, 0.0, [StageSpan("prefill", 2.0, 1.0)]),
        StageReport("d1", 0.0, 0.0, [StageSpan("transfer", 3.0, 1.0), StageSpan("retracted", 4.0, 1.0)]),
        StageReport("d2", 0.0, 0.0, [StageSpan("prefill", 6.0, 1.0)]),
    )
    found = [span.resource.attributes for span in otlp._SpanMaker().of(timeline, 0.0)]
    assert {(one["service.instance.id"], one["service.name"]) for one in found} == {
        ("gateway", "baton-gateway"), ("p", "baton-prefill"), ("d1", "baton-decode"), ("d2", "baton-decode"),
    }  # fmt: skip


@pytest.mark.slow
def test_resources_of_nodes_that_are_gone_are_not_kept_for_ever() -> None:
    maker = otlp._SpanMaker()
    for number in range(otlp.MAX_RESOURCES + 1):
        maker._resource_of(f"node-{number}", "prefill")
    assert len(maker._resources) <= otlp.MAX_RESOURCES
