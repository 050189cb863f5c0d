"""The files of ``/`` and ``/docs``: types, tags and security policy. ``tests/service`` opens both in a browser."""

import re

import pytest
from support.gateway.fake_nodes import running
from yarl import URL

from common.cache.page_layout import ITEM_BYTES, SCALE_BYTES
from common.errors import ErrorCode
from gateway.http.routes.page import FOLDER

NAMES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.fixture
async def stack(folder):
    async with running(folder, api_key="secret-key") as running_stack:
        yield running_stack


async def test_the_page_and_its_files_need_no_key(stack):
    for path in ("/", *(f"/static/{name}" for name in NAMES)):
        async with stack.client.get(stack.url + path) as answer:
            assert answer.status == 200
            kind = TYPES[path.rpartition(".")[2] if path != "/" else "html"]
            assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert await answer.read() == (FOLDER / (path.rpartition("/")[2] or "index.html")).read_bytes()


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_the_policy_allows_no_inline_script_or_style_and_no_other_server(stack, path):
    async with stack.client.get(stack.url + path) as answer:
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {source for name, source in policy.items() if name.endswith("-src")} == {"'none'", "'self'"}


async def test_a_file_that_the_browser_has_is_not_sent_again(stack):
    for path in ("/", "/static/app.js"):
        async with stack.client.get(stack.url + path) as answer:
            tag = answer.headers["ETag"]
        for known in (tag, f'"other", {tag}', f"W/{tag}"):
            async with stack.client.get(stack.url + path, headers={"If-None-Match": known}) as answer:
                assert (answer.status, await answer.read()) == (304, b"")
                assert answer.headers["ETag"] == tag
        async with stack.client.get(stack.url + path, headers={"If-None-Match": '"other"'}) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    "name", ["nothing.js", "..", "../app.py", "%2e%2e%2fapp.py", "..%2froutes%2fpage.py", "app.js/", ""]
)
async def test_no_other_file_can_be_read(stack, name):
    async with stack.client.get(URL(f"{stack.url}/static/{name}", encoded=True)) as answer:
        assert answer.status in (401, 404)
        assert (await answer.json())["error"]["code"] in ("not_found", "authentication")


def test_no_script_parses_data_as_html():
    banned = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function")
    for path in FOLDER.glob("*.js"):
        assert not banned.search(path.read_text()), path.name


def test_files_name_only_this_server():
    for path in FOLDER.iterdir():
        addresses = set(re.findall(r"https?://[\w./-]+", path.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name


@pytest.mark.parametrize(("table", "known"), [("ITEM_BYTES", ITEM_BYTES), ("SCALE_BYTES", SCALE_BYTES)])
def test_the_page_knows_every_format_of_kv_pages(table, known):
    (words,) = re.findall(rf"const {table} = {{ (.*?) }}", (FOLDER / "nodes.js").read_text())
    assert {name: int(size) for name, size in (pair.split(": ") for pair in words.split(", "))} == known


def test_the_page_knows_every_code_of_an_error():
    codes = re.findall(r'^  (\w+): "', (FOLDER / "queues.js").read_text(), re.MULTILINE)
    assert set(codes) == set(ErrorCode)


def test_each_state_of_a_node_has_a_colour():
    states = re.findall(r'return \["(\w+)", ', (FOLDER / "nodes.js").read_text())
    coloured = re.findall(r'\.node\[data-state="(\w+)"\] \.dot', (FOLDER / "dashboard.css").read_text())
    assert set(states) == set(coloured)


def test_scripts_stay_short():
    assert all(len(path.read_text().splitlines()) <= 300 for path in FOLDER.glob("*.js"))
