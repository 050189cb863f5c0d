"""API keys, admins, tenants, and the tenant header."""

import pytest

from common.config.gateway import GatewayConfig
from common.errors import ConfigError, ErrorCode, RequestError
from gateway.http.access.api_keys import digest_of, permanent_keys
from gateway.http.access.auth import ApiKey, Authenticator

OPEN = Authenticator({})


def known_keys(api_key="main", admin_key=None, **options):
    known = Authenticator(permanent_keys(GatewayConfig(api_key=api_key, admin_api_key=admin_key)), **options)
    known.replace_keys(
        {
            digest_of("k1"): ApiKey("a"),
            digest_of("k2"): ApiKey("a"),
            digest_of("k3"): ApiKey("b", is_admin=True),
            digest_of("k4"): ApiKey(expires_at=100.0),
        }
    )
    return known


def bearer(key, **headers):
    return {"authorization": f"Bearer {key}", **headers}


def refused(known, headers, **options):
    with pytest.raises(RequestError) as caught:
        known.caller(headers, **options)
    return caught.value


def is_admin(known, headers):
    caller = known.caller(headers)
    try:
        known.check_admin(caller)
    except RequestError as error:
        assert not caller.is_admin
        return error.code
    return caller.is_admin


def test_each_key_has_its_tenant_and_the_api_key_has_none():
    known = known_keys()
    assert [known.caller(bearer(key)).tenant for key in ("k1", "k2", "k3", "main")] == ["a", "a", "b", ""]


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", "Bearer k", "bearer k", "Basic k1", "k1", "Bearer k1 ", "Bearer \udcff"]
)
def test_an_unknown_key_is_refused(given):
    assert refused(known_keys(), {"authorization": given}).code is ErrorCode.AUTHENTICATION
    assert known_keys().caller({"authorization": given}, is_open=True).tenant == ""


@pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
def test_the_word_bearer_may_be_written_in_any_case(scheme):
    assert known_keys().caller({"authorization": f"{scheme} k3"}).tenant == "b"


def test_a_key_may_come_as_in_anthropics_api():
    known = known_keys()
    for headers in (
        {"x-api-key": "k3"},
        {"x-api-key": "k3", "authorization": "Bearer unknown"},
        {"x-api-key": "unknown", "authorization": "Bearer k3"},
    ):
        assert known.caller(headers).tenant == "b"
    for given in ("", "k", "Bearer k3"):
        assert refused(known, {"x-api-key": given}).code is ErrorCode.AUTHENTICATION


def test_without_configured_keys_all_requests_are_accepted_from_admins():
    assert OPEN.caller({}).tenant == ""
    assert is_admin(OPEN, {})
    assert is_admin(OPEN, bearer("any"))


def test_a_key_is_refused_once_it_has_expired():
    now = [99.9]
    known = known_keys(unix_time=lambda: now[0])
    assert known.caller(bearer("k4")).tenant == ""
    now[0] = 100.0
    assert refused(known, bearer("k4")).code is ErrorCode.AUTHENTICATION


def test_replaced_keys_are_refused_and_nothing_opens_without_any():
    known = known_keys(api_key=None, admin_key="root")
    known.replace_keys({digest_of("k5"): ApiKey("c")})
    assert known.caller(bearer("k5")).tenant == "c"
    assert is_admin(known, bearer("root")) is True
    known.replace_keys({})
    for headers in (bearer("k1"), bearer("k5"), {}):
        assert refused(known, headers).code is ErrorCode.AUTHENTICATION
    assert is_admin(known, bearer("root")) is True


def test_without_an_admin_key_and_a_file_the_api_key_is_an_admins():
    known = Authenticator(permanent_keys(GatewayConfig(api_key="main")))
    assert is_admin(known, bearer("main")) is True


def test_with_an_admin_key_it_alone_is_an_admins():
    known = known_keys(admin_key="root")
    assert is_admin(known, bearer("root")) is True
    assert is_admin(known, bearer("k3")) is True
    for key in ("main", "k1", "k4"):
        assert is_admin(known_keys(admin_key="root", unix_time=lambda: 0.0), bearer(key)) == "permission_denied"
    alone = Authenticator(permanent_keys(GatewayConfig(admin_api_key="root")))
    assert alone.caller({}).tenant == ""  # other endpoints need no key
    assert is_admin(alone, {}) == "authentication"
    assert is_admin(alone, bearer("root")) is True


def test_with_a_file_of_keys_only_its_admins_are_admins():
    assert is_admin(known_keys(), bearer("main")) == "permission_denied"
    assert is_admin(known_keys(), bearer("k3")) is True


def test_a_tenant_named_by_the_header_is_no_admin():
    known = Authenticator({}, is_header_taken=True)
    assert is_admin(known, {}) is True
    assert is_admin(known, {"x-baton-tenant": "a"}) == "authentication"


def test_the_tenant_header_is_refused_unless_configured():
    error = refused(OPEN, {"x-baton-tenant": "a"})
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "x-baton-tenant")


def test_the_header_names_the_tenant_if_the_key_has_none():
    known = known_keys(is_header_taken=True)
    assert known.caller(bearer("main", **{"x-baton-tenant": "c"})).tenant == "c"
    assert known.caller(bearer("k1", **{"x-baton-tenant": "a"})).tenant == "a"
    assert refused(known, bearer("k1", **{"x-baton-tenant": "b"})).code is ErrorCode.AUTHENTICATION
    assert refused(known, {"x-baton-tenant": "a"}).code is ErrorCode.AUTHENTICATION


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "ä", "a\n"])
def test_an_invalid_tenant_name_is_refused(name):
    error = refused(Authenticator({}, is_header_taken=True), {"x-baton-tenant": name})
    assert error.param == "x-baton-tenant"


def test_the_api_key_and_the_admin_key_differ():
    with pytest.raises(ConfigError, match="--api-key and --admin-api-key are the same"):
        GatewayConfig(api_key="main", admin_api_key="main")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tenant_quotas": ("a:requests=1",)}, "--tenant-quotas has no effect"),
        ({"tenant_shares": ("a:2",), "schedule_policy": "fair"}, "--tenant-shares has no effect"),
        ({"tenant_quotas": ("a",), "tenant_header": True}, "--tenant-quotas must be like"),
    ],
)
def test_tenant_options_without_tenants_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        GatewayConfig(**options)
