"""The log line of an ended request: one for each output, with its ids, counts and times, and no text."""

import logging

import pytest
from support.gateway.fake_nodes import error_of, running, start_request

from common.errors import ErrorCode
from common.logs import FIELDS
from common.wire.messages import KeptOutput
from gateway.requests.idempotency import identify

NAME = "gateway.requests.request_log"


@pytest.fixture
def lines(caplog):
    """Return the fields of the request lines so far."""
    caplog.set_level(logging.INFO, logger=NAME)
    return lambda: [getattr(record, FIELDS) for record in caplog.records if record.name == NAME]


async def test_a_finished_request_has_one_line_with_its_nodes_counts_and_times(folder, lines):
    classes = {"priority_classes": ("high:8", "low:1"), "default_priority_class": "low"}
    async with running(folder, enable_priority_scheduling=True, **classes) as stack:
        await stack.pair()
        body = {"prompt": "abcd", "max_tokens": 3, "priority_class": "high"}
        status, answer = await stack.post("/v1/completions", body, **{"x-request-id": "mine"})
        assert status == 200, answer
    (line,) = lines()
    assert 0 < line.pop("ttft_s") <= line.pop("duration_s")
    assert line == {
        "rid": answer["id"],
        "request_id": answer["id"],
        "x_request_id": "mine",
        "model": "tiny",
        "tenant": "",
        "status": "length",
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        "output_tokens": 3,
        "num_attempts": 1,
        "prefill": "prefill",
        "decode": "decode",
        "priority_class": "high",
    }


async def test_each_output_of_a_request_has_a_line(folder, lines):
    async with running(folder) as stack:
        await stack.pair()
        assert (await stack.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 1}))[0] == 200
    rids = [line["rid"] for line in lines()]
    assert len(set(rids)) == 4


async def test_an_output_that_a_node_has_kept_whole_has_a_line_and_leaves_nothing_in_flight(folder, lines):
    path, body = "/v1/completions", b'{"prompt": "DEF", "max_tokens": 3}'
    async with running(folder, tenant_header=True, tenant_quotas=("one:requests=1",)) as stack:
        _, decode = await stack.pair()
        for key in ("first", "second"):  # of which the tenant may have one at a time
            decode.kept = (KeptOutput(f"{identify(path, body, 'one', key, None).digest}-0", (65, 66, 67), "length"),)
            headers = {"content-type": "application/json", "idempotency-key": key, "x-baton-tenant": "one"}
            async with stack.client.post(stack.url + path, data=body, headers=headers) as answer:
                assert (answer.status, answer.headers["idempotent-replayed"]) == (200, "true")
        assert not decode.generates
    assert [(line["status"], line["output_tokens"], line["num_attempts"]) for line in lines()] == [("length", 3, 0)] * 2


async def test_a_failed_request_has_its_error_code_and_no_first_token(folder, lines):
    async with running(folder) as stack:
        _, decode = await stack.silent_pair()
        call, rid = await start_request(stack)
        decode.fail(rid, ErrorCode.OUT_OF_PAGES)
        assert (await error_of(call))[1] == "out_of_pages"
    (line,) = lines()
    assert (line["status"], line["ttft_s"], line["output_tokens"]) == ("out_of_pages", None, 0)


async def test_no_line_is_written_with_no_log_requests(folder, lines):
    async with running(folder, log_requests=False) as stack:
        await stack.pair()
        assert (await stack.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[0] == 200
    assert lines() == []
