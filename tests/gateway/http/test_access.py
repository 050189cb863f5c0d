"""Every route of the application needs what the table in docs/security.md says."""

import re
from pathlib import Path

import pytest
from support.gateway.fake_nodes import running

from gateway.http.routes import unsupported

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
ROW = re.compile(r"^\| `(/[^`]*)` \| ([A-Z, ]+) \| (nothing|user|admin) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text())
TABLE = {(path, method): needs for path, methods, needs in ROWS for method in methods.split(", ")}
KEYS = {"nothing": {}, "user": {"Authorization": "Bearer k"}, "admin": {"Authorization": "Bearer root"}}


@pytest.fixture
async def stack(folder):
    async with running(folder, api_key="k", admin_api_key="root") as running_stack:
        yield running_stack


def routes_of(routes):
    """Path and method of every route that answers, those of included routers too."""
    found = set()
    for route in routes:
        if hasattr(route, "original_router"):
            found |= routes_of(route.original_router.routes)
        else:
            found |= {(route.path, method) for method in route.methods - {"HEAD"}}
    return {(path, method) for path, method in found if path.removesuffix("/{rest:path}") not in unsupported.PATHS}


async def test_the_table_has_every_route_and_no_other(stack):
    assert routes_of(stack.gateway._http._config.app.routes) == set(TABLE)


async def test_every_route_needs_the_key_that_the_table_says(stack):
    for (path, method), needs in TABLE.items():
        url = stack.url + re.sub(r"\{[^}]*\}", "x", path)
        allowed = list(KEYS).index(needs)
        for level, (caller, headers) in enumerate(KEYS.items()):
            data = None if method == "GET" else b"{}"
            headers = {**headers, "Content-Type": "application/json"}
            async with stack.client.request(method, url, data=data, headers=headers) as answer:
                is_refused = answer.status in (401, 403)
                assert is_refused == (level < allowed), f"{method} {path} by {caller}: {answer.status}"
                if is_refused:
                    assert answer.status == (401 if caller == "nothing" else 403)


async def test_routes_refused_by_name_need_a_key_too(stack):
    for path in unsupported.PATHS:
        assert (await stack.get(path))[0] == 401
        assert (await stack.get(path, **KEYS["user"]))[0] == 400


async def test_ending_all_requests_needs_an_admin(stack):
    for caller, status in (("nothing", 401), ("user", 403), ("admin", 200)):
        assert (await stack.post("/abort_request", {"abort_all": True}, **KEYS[caller]))[0] == status


async def test_a_tenant_that_a_proxy_adds_to_that_of_its_client_is_refused(folder):
    async with running(folder, tenant_header=True) as stack:
        for tenants, status in ((["a"], 200), (["a", "b"], 400), (["b", "a"], 400)):
            headers = [("x-baton-tenant", tenant) for tenant in tenants]
            async with stack.client.get(f"{stack.url}/v1/models", headers=headers) as answer:
                assert answer.status == status
                assert status == 200 or (await answer.json())["error"]["param"] == "x-baton-tenant"
