"""Timelines over HTTP: what is shown to which caller, and for how long it is kept."""

import asyncio
import hashlib
import threading
import time
from typing import Any

import msgspec
import pytest
from support.gateway.fake_nodes import FakeNode, Stack, echo, running, start_request

from common.sampling_params import SamplingParams
from common.stage_spans import StageSpan
from common.wire.messages import Generate, Spans
from gateway.http.openapi import answers
from gateway.http.routes import traces
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream, StageReport
from gateway.tracing.chrome_trace import chrome_trace
from gateway.tracing.timelines import Timeline, Timelines
from gateway.workers.clock_offset import MAX_DRIFT


def generate(rid: str, length: int = 3) -> dict[str, Any]:
    return {"text": "ab", "rid": rid, "sampling_params": {"max_new_tokens": length}}


async def timeline(stack: Stack, rid: str, **headers: str) -> tuple[int, Any]:
    async with stack.client.get(f"{stack.url}/v1/requests/{rid}/timeline", headers=headers) as answer:
        return answer.status, await answer.json()


async def test_a_request_is_listed_and_its_timeline_has_the_spans_of_all_processes(folder) -> None:
    async with running(folder) as stack:
        await stack.pair()
        before = time.time()
        assert (await stack.post("/generate", generate("a")))[0] == 200
        (listed,) = (await stack.get("/v1/requests"))[1]["requests"]
        assert before - 1 <= listed["started_at"] <= time.time()
        assert 0 < listed["ttft_s"] <= listed["duration_s"]
        del listed["started_at"], listed["duration_s"], listed["ttft_s"]
        assert listed == {
            "rid": "a", "model": "tiny", "status": "length", "prompt_tokens": 2, "cached_tokens": 1,
            "output_tokens": 3, "num_attempts": 1, "prefill": "prefill", "decode": "decode",
        }  # fmt: skip
        status, shown = await timeline(stack, "a")
        assert status == 200
        assert shown["trace_id"] == hashlib.sha256(b"a").hexdigest()[:32]
        durations = {(span["process"], span["name"]): span["duration_s"] for span in shown["spans"]}
        assert durations.pop(("gateway", "queue")) >= 0
        assert durations == {
            ("prefill", "prefill_queue"): 0.25, ("prefill", "prefill"): 0.5,
            ("decode", "decode_queue"): 0.125, ("decode", "transfer"): 1.0,
        }  # fmt: skip
        counted = {span["name"]: span["attributes"] for span in shown["spans"] if span["attributes"]}
        assert counted == {"prefill": {"num_tokens": 2}, "transfer": {"num_pages": 3}}
        msgspec.convert(shown, answers.RequestTimeline)


async def test_spans_are_shown_in_the_time_of_the_gateway_with_the_error_of_the_clock(folder) -> None:
    """The prefill node's clock is an hour ahead, that of the decode node is unknown."""
    async with running(folder) as stack:
        prefill, _ = await stack.pair()
        gateway = stack.gateway
        (worker,) = [node for node in gateway._control.pools.workers() if node.name == "prefill"]
        now = gateway._clock.now()
        worker.clock.sent_by_gateway(now - 0.25, now + 3_600, now)
        worker.clock.sent_by_node(now + 3_600, now + 0.25)

        def on_generate(node: FakeNode, message: Generate) -> None:
            instant = gateway._clock.now() + 3_600
            node.spans(message.rid, StageSpan("prefill_queue", instant, 0.0), StageSpan("prefill", instant, 0.5))
            node.tokens(message.rid, 0, message.prompt[:1], finish="length")

        prefill.on_generate = on_generate
        assert (await stack.post("/generate", generate("a", 1)))[0] == 200
        _, shown = await timeline(stack, "a")
        clock = shown["clocks"]["prefill"]
        assert abs(clock["offset_s"] - 3_600) <= clock["error_s"] < 0.3
        (span,) = [span for span in shown["spans"] if span["name"] == "prefill"]
        assert abs(span["start_s"]) <= clock["error_s"] + shown["duration_s"]


async def test_a_running_request_has_a_timeline(folder) -> None:
    async with running(folder) as stack:
        prefill, _ = await stack.silent_pair()
        call, rid = await start_request(stack)
        prefill.spans(rid, StageSpan("prefill_queue", 1.0, 0.5))
        await prefill.round_trip()
        (listed,) = (await stack.get("/v1/requests"))[1]["requests"]
        assert (listed["status"], listed["ttft_s"]) == ("running", None)
        _, shown = await timeline(stack, rid)
        assert sorted(span["name"] for span in shown["spans"]) == ["prefill_queue", "queue"]
        assert shown["trace_id"] == rid.removeprefix("cmpl-")
        for node in stack.nodes:
            echo(node, node.generates[rid])
        assert (await call).status == 200


async def test_spans_that_come_after_the_end_are_added(folder) -> None:
    async with running(folder) as stack:
        prefill, _ = await stack.silent_pair()
        call, rid = await start_request(stack)
        assert (await stack.post("/abort_request", {"rid": rid}))[1] == {"aborted": 1}
        await call
        prefill.spans(rid, StageSpan("prefill_queue", 1.0, 0.5))
        prefill.send(Spans(rid, prefill.attempt(rid) + 1, (StageSpan("prefill", 1.0, 0.5),)))
        await prefill.round_trip()
        _, shown = await timeline(stack, rid)
        assert shown["status"] == "aborted"
        assert sorted(span["name"] for span in shown["spans"]) == ["prefill_queue", "queue"]


async def test_only_the_last_requests_are_kept(folder) -> None:
    async with running(folder, timeline_requests=2) as stack:
        await stack.pair()
        for rid in "abc":
            await stack.post("/generate", generate(rid))
        listed = (await stack.get("/v1/requests"))[1]["requests"]
        assert [one["rid"] for one in listed] == ["c", "b"]
        assert [one["rid"] for one in (await stack.get("/v1/requests?limit=1"))[1]["requests"]] == ["c"]
        assert (await timeline(stack, "a"))[0] == 404
    async with running(folder, timeline_requests=0) as stack:
        await stack.pair()
        await stack.post("/generate", generate("a"))
        assert (await stack.get("/v1/requests"))[1] == {"requests": []}


@pytest.mark.parametrize(
    "query", ["/v1/requests?limit=0", "/v1/requests?limit=x", "/v1/trace?seconds=0", "/v1/trace?seconds=1e9"]
)
async def test_bad_parameters_are_refused(folder, query: str) -> None:
    async with running(folder) as stack:
        assert (await stack.get(query))[0] == 400


async def test_a_tenant_sees_its_own_requests_alone(folder) -> None:
    async with running(folder, tenant_header=True) as stack:
        await stack.pair()
        for tenant in ("blue", "red"):
            await stack.post("/generate", generate(tenant), **{"x-baton-tenant": tenant})
        blue = {"x-baton-tenant": "blue"}
        async with stack.client.get(f"{stack.url}/v1/requests", headers=blue) as answer:
            assert [one["rid"] for one in (await answer.json())["requests"]] == ["blue"]
        assert (await timeline(stack, "blue", **blue))[0] == 200
        assert (await timeline(stack, "red", **blue))[0] == 404
        async with stack.client.get(f"{stack.url}/v1/trace?seconds=60", headers=blue) as answer:
            events = (await answer.json())["traceEvents"]
        assert {event["args"]["rid"] for event in events if event["ph"] == "X"} == {"blue"}
        assert len((await stack.get("/v1/requests"))[1]["requests"]) == 2, "a caller without a tenant sees all"


async def test_the_outputs_of_one_request_are_found_by_its_id(folder) -> None:
    async with running(folder) as stack:
        await stack.pair()
        _, answer = await stack.post("/v1/completions", {"prompt": "ab", "n": 2, "max_tokens": 2})
        rids = [one["rid"] for one in (await stack.get("/v1/requests"))[1]["requests"]]
        assert sorted(rids) == [f"{answer['id']}-0", f"{answer['id']}-1"]
        assert (await timeline(stack, answer["id"]))[0] == 200


async def test_a_window_of_time_is_a_valid_chrome_trace(folder) -> None:
    async with running(folder) as stack:
        await stack.pair()
        await asyncio.gather(*(stack.post("/generate", generate(rid)) for rid in "abcd"))
        status, trace = await stack.get("/v1/trace?seconds=60")
        assert status == 200
        msgspec.convert(trace, answers.ChromeTrace)
        check_chrome_trace(trace)
        events = trace["traceEvents"]
        processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert sorted(processes.values()) == ["decode", "gateway", "prefill"]
        whole = [event for event in events if event["name"] == "request"]
        assert {event["args"]["rid"] for event in whole} == set("abcd")


def check_chrome_trace(trace: dict[str, Any]) -> None:
    """What the trace event format demands: fields by type of event, named processes, and nesting on every track."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = {event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["pid"] in named
        if event["ph"] == "X":
            assert min(event["dur"], event["ts"]) >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + 0.002:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002, "spans of a track overlap"
            open_until.append(end)


def timeline_of(*reports: StageReport, started_at: float = 100.0, ended_at: float = 110.0) -> Timeline:
    request = GenerateRequest("a", "a", (1,), SamplingParams(max_new_tokens=1))
    stream = OutputStream(request, 0, lambda: None, lambda stream: None, started_at)  # type: ignore[arg-type, return-value]
    stream.sent_at, stream.is_ended, stream.ended_at, stream.finish = started_at, True, ended_at, "stop"
    stream.reports.extend(reports)
    return Timeline.of(stream)


@pytest.mark.parametrize("still_runs", [False, True])
def test_a_request_of_several_outputs_is_shown_by_its_first(still_runs: bool) -> None:
    def stream(number: int) -> OutputStream:
        request = GenerateRequest(f"x-{number}", "x", (1,), SamplingParams())
        return OutputStream(request, number, lambda: None, lambda stream: None, 1.0)  # type: ignore[arg-type, return-value]

    timelines = Timelines(20, lambda: [stream(0)] if still_runs else [])
    for number in (10, 2, 1, *(() if still_runs else (0,))):
        timelines.ended(stream(number))
    assert [found.rid for name in ("x", "x-10") if (found := timelines.find(name))] == ["x-0", "x-10"]


def test_all_spans_of_a_node_move_by_the_offset_of_its_most_exact_report() -> None:
    """The node's clock is about 500 s ahead. Its spans touch, and are shown so."""
    first = StageReport("d", 500.5, 1.0, (StageSpan("transfer", 602.0, 1.0),))
    second = StageReport("d", 500.0, 0.25, (StageSpan("decode", 603.0, 4.0),))
    timeline = timeline_of(first, second)
    shown = {span.name: (span.start_at, span.duration_s) for span in timeline.spans(200.0)}
    assert shown == {"queue": (100.0, 0.0), "transfer": (102.0, 1.0), "decode": (103.0, 4.0)}
    assert timeline.clocks(200.0) == {"d": (500.0, 0.25 + 10 * MAX_DRIFT)}


def test_outputs_that_overlap_have_tracks_of_their_own_and_a_free_track_is_taken_again() -> None:
    times = [(100.0, 110.0), (105.0, 115.0), (110.0, 120.0)]
    trace = chrome_trace([timeline_of(started_at=start, ended_at=end) for start, end in times], 200.0)
    check_chrome_trace(trace)
    whole = [(event["ts"], event["dur"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "request"]
    assert whole == [(0.0, 10e6, 1), (5e6, 10e6, 2), (10e6, 10e6, 1)]


def test_a_span_that_a_wrong_clock_moves_beyond_its_parent_is_cut() -> None:
    spans = (StageSpan("prefill", 1.0, 2.0), StageSpan("prefill_chunk", 2.5, 1.0))
    trace = chrome_trace([timeline_of(StageReport("p", 0.0, 1.0, spans))], 200.0)
    check_chrome_trace(trace)
    assert min(event["ts"] for event in trace["traceEvents"] if event["ph"] == "X") == 0


def ended_stream(rid: str, *, attempt: int = 0, decode: str = "") -> OutputStream:
    request = GenerateRequest(rid, rid, (1,), SamplingParams(max_new_tokens=1))
    stream = OutputStream(request, 0, lambda: None, lambda stream: None, 1.0)  # type: ignore[arg-type, return-value]
    stream.attempt, stream.decode, stream.is_ended, stream.ended_at = attempt, decode, True, 2.0
    return stream


def test_an_id_that_is_used_again_before_any_node_is_listed_as_the_newest() -> None:
    timelines = Timelines(3, lambda: ())
    for rid in ("a", "b", "a"):
        timelines.ended(ended_stream(rid))
    assert [one.rid for one in timelines.since(0.0, 9)] == ["a", "b"]


def test_the_last_are_those_that_began_last_and_no_others_are_made_of_the_outputs_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = [ended_stream(f"r{number}") for number in range(100)]
    for number, stream in enumerate(running):
        stream.started_at = 10.0 + number
    timelines = Timelines(3, lambda: reversed(running))
    timelines.ended(ended_stream("old"))
    late = ended_stream("late")
    late.started_at = 108.5
    timelines.ended(late)
    made: list[str] = []
    of = Timeline.of
    monkeypatch.setattr(Timeline, "of", lambda stream: made.append(stream.request.rid) or of(stream))
    assert [one.rid for one in timelines.last(3)] == ["r99", "late", "r98"]
    assert made == ["r99", "r98", "r97"]
    assert [one.rid for one in timelines.since(0.0, 2)] == ["r99", "r98"]
    found = timelines.find("r5")
    assert found is not None and found.rid == "r5"
    assert len(made) == 6
    assert timelines.last(3, "other tenant") == []


def test_late_spans_are_taken_only_from_the_nodes_of_an_output() -> None:
    timelines = Timelines(1, lambda: ())
    timelines.ended(ended_stream("a", attempt=5, decode="d"))
    spans = (StageSpan("decode", 1.0, 1.0),)
    for node in ("other", "d"):
        timelines.reported("a", 5, StageReport(node, 0.0, 1.0, spans))
    assert [report.node for one in timelines.since(0.0, 9) for report in one.reports] == ["d"]


async def test_one_trace_is_made_at_a_time(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace takes up to a second of the interpreter's time, and delays every stream meanwhile."""
    counts, lock = [0], threading.Lock()

    def counted(timelines: Any, now: float) -> dict[str, Any]:
        assert lock.acquire(blocking=False), "two traces are made at once"
        time.sleep(0.02)
        lock.release()
        counts[0] += 1
        return {"traceEvents": []}

    monkeypatch.setattr(traces, "chrome_trace", counted)
    async with running(folder) as stack:
        answers = await asyncio.gather(*(stack.get("/v1/trace") for _ in range(4)))
    assert [status for status, _ in answers] == [200] * 4
    assert counts == [4]
