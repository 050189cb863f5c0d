"""Quotas of tenants, and that a request is accepted after its Retry-After."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.tenancy import Quota, parse_quotas
from common.errors import ConfigError, ErrorCode, RequestError
from common.sampling_params import SamplingParams
from gateway.requests.admission.quotas import MAX_IDLE_TENANTS, Quotas, charge
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream


def refused(quotas, tenant="a", count=1, tokens=0, now=0.0):
    with pytest.raises(RequestError) as caught:
        quotas.admit(tenant, count, tokens, now)
    return caught.value


def test_requests_in_flight_are_bounded_by_tenant():
    quotas = Quotas({"a": Quota(requests=2)})
    quotas.admit("a", 2, 0, 0.0)
    error = refused(quotas, now=1.0)
    assert (error.code, error.message) == (
        ErrorCode.QUEUE_FULL, "the tenant a has 2 requests in flight, its quota is 2",
    )  # fmt: skip
    assert error.retry_after_s == 1.0
    quotas.admit("b", 50, 0, 1.0)
    quotas.admit("", 50, 0, 1.0)
    quotas.ended("a", charged=0, tokens=0, now=4.0, in_flight_s=4.0)
    quotas.admit("a", 1, 0, 4.0)
    assert refused(quotas, now=4.0).retry_after_s == 2.0  # two at once, for 4 s each


def test_a_batch_beyond_the_quota_is_an_invalid_request():
    error = refused(Quotas({"a": Quota(requests=2)}), count=3)
    assert (error.code, error.retry_after_s) == (ErrorCode.INVALID_REQUEST, None)


def test_the_bucket_fills_evenly_and_debts_are_paid_first():
    quotas = Quotas({"a": Quota(tokens_per_minute=600)})  # ten a second
    quotas.admit("a", 1, 500, 0.0)
    quotas.admit("a", 1, 300, 0.0)  # accepted with 100 tokens left; leaves a debt of 200
    error = refused(quotas, now=0.0)
    assert error.message == "the tenant a has used its quota of 600 tokens per minute"
    assert error.retry_after_s == 21.0  # 20 s to pay, and a tenth for the first token: whole seconds
    assert refused(quotas, now=19.0).retry_after_s == 2.0
    quotas.admit("a", 1, 0, 21.0)


def test_the_real_cost_is_settled_at_the_end():
    quotas = Quotas({"a": Quota(tokens_per_minute=600)})
    quotas.admit("a", 1, 600, 0.0)
    refused(quotas)
    quotas.ended("a", charged=600, tokens=50, now=0.0)
    quotas.admit("a", 1, 550, 0.0)
    quotas.ended("a", charged=550, tokens=650, now=0.0)
    assert refused(quotas).retry_after_s == 11.0  # 100 too many


def test_a_full_bucket_holds_one_minutes_tokens_and_no_more():
    quotas = Quotas({"a": Quota(tokens_per_minute=60)})
    quotas.admit("a", 1, 0, 0.0)
    quotas.admit("a", 1, 61, 3600.0)
    refused(quotas, now=3600.0)


@pytest.mark.parametrize(("before", "after"), [(60, 6_000), (6_000, 60)])
def test_a_new_quota_applies_from_its_change_on(before, after):
    quotas = Quotas({"a": Quota(tokens_per_minute=before)})
    quotas.admit("a", 1, before + 6_000, 0.0)  # leaves a debt of 6,000 tokens
    quotas.replace({"a": Quota(tokens_per_minute=after)}, 30.0)
    debt = 6_000 - before / 2  # which half a minute has paid off in part
    assert refused(quotas, now=30.0).retry_after_s == math.ceil((debt + 1) * 60 / after)


def test_a_refused_request_costs_nothing():
    quotas = Quotas({"a": Quota(requests=1, tokens_per_minute=60)})
    quotas.admit("a", 1, 60, 0.0)
    quotas.ended("a", charged=60, tokens=0, now=0.0)
    quotas.admit("a", 1, 60, 0.0)


@pytest.mark.parametrize("code", [ErrorCode.QUEUE_FULL, ErrorCode.NO_ROUTE, ErrorCode.DEADLINE_EXCEEDED])
def test_a_request_that_ends_before_a_node_gets_it_costs_nothing(code):
    quotas = Quotas({"a": Quota(tokens_per_minute=60)})
    request = GenerateRequest("r", "r", (1,) * 60, SamplingParams(max_new_tokens=5), tenant="a")
    stream = OutputStream(request, 0, lambda: None, lambda stream: None, 0.0)
    quotas.admit("a", 1, charge(request), 0.0)
    stream.fail(RequestError(code, "it has waited in the queue"), 0.0)
    quotas.settle(stream)
    quotas.admit("a", 1, charge(request), 0.0)
    stream.num_attempts = 1
    quotas.settle(stream)
    refused(quotas)


def test_the_star_applies_to_each_unnamed_tenant_alone():
    quotas = Quotas({"a": Quota(requests=3), "*": Quota(requests=1)})
    quotas.admit("a", 3, 0, 0.0)
    for tenant in "bc":
        quotas.admit(tenant, 1, 0, 0.0)
        refused(quotas, tenant)
    quotas.admit("", 9, 0, 0.0)  # no tenant


def test_only_idle_tenants_are_forgotten():
    quotas = Quotas({"*": Quota(requests=1)})
    quotas.admit("busy", 1, 0, 0.0)
    for i in range(MAX_IDLE_TENANTS + 50):
        quotas.admit(f"t{i}", 1, 0, 0.0)
        quotas.ended(f"t{i}", charged=0, tokens=0, now=0.0)
    assert len(quotas._accounts) == MAX_IDLE_TENANTS
    refused(quotas, "busy")


@given(st.lists(st.tuples(st.floats(0, 90), st.integers(0, 400)), max_size=30))
def test_a_request_is_accepted_after_its_retry_after(arrivals):
    quotas, now = Quotas({"a": Quota(tokens_per_minute=100)}), 0.0
    for pause, tokens in arrivals:
        now += pause
        try:
            quotas.admit("a", 1, tokens, now)
        except RequestError as error:
            now += error.retry_after_s
            quotas.admit("a", 1, tokens, now)
        quotas.ended("a", charged=tokens, tokens=tokens, now=now)


def test_quotas_are_parsed():
    texts = ("a:requests=8", "tokens_per_minute=60000", "org:b:requests=1", "*:tokens_per_minute=5")
    assert parse_quotas(texts) == {
        "a": Quota(8, 60_000), "org:b": Quota(1, None), "*": Quota(None, 5),
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["a", "requests=1", "a:requests", "a:requests=0", "a:requests=x", "a:rows=1", ":requests=1"]
)
def test_an_invalid_quota_is_refused(text):
    with pytest.raises(ConfigError, match="--tenant-quotas must be like"):
        parse_quotas([text])
    with pytest.raises(ConfigError, match="gives requests of a twice"):
        parse_quotas(["a:requests=1", "requests=2"])


def test_a_new_tenant_is_not_forgotten_at_once(monkeypatch):
    monkeypatch.setattr("gateway.requests.admission.quotas.MAX_IDLE_TENANTS", 2)
    quotas = Quotas({"*": Quota(requests=1)})
    for name in ("a", "b", "c"):  # and no request ends
        quotas.admit(name, 1, 0, 0.0)
    assert list(quotas._accounts) == ["a", "b", "c"]


def test_tenants_without_limits_displace_no_account():
    quotas = Quotas({"a": Quota(tokens_per_minute=60)})
    quotas.admit("a", 1, 600, 0.0)
    quotas.ended("a", charged=600, tokens=600, now=0.0)
    for i in range(MAX_IDLE_TENANTS + 1):
        quotas.admit(f"t{i}", 1, 0, 0.0)
        quotas.ended(f"t{i}", charged=0, tokens=0, now=0.0)
    refused(quotas, "a")
    assert list(quotas._accounts) == ["a"]
