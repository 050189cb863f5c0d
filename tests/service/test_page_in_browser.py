"""The pages at ``/`` and ``/docs`` in Chromium, which must be installed, over a gateway with fake nodes."""

import asyncio
import contextlib
import itertools
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright
from support.gateway.fake_nodes import echo, make_model_folder, running, silent
from support.gateway.toy_formats import TOY_FORMATS
from support.gateway.toy_stack import answers, ids_of, last_prompt, toy_stack

from common.stage_spans import StageSpan
from common.wire.messages import Heartbeat, Pairs, PairState

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT_MS = 180_000
#: Elements that are wider than the panel around them.
OVERFLOWING = """() => [...document.querySelectorAll(".panel")].filter((panel) => panel.scrollWidth > panel.clientWidth)
    .map((panel) => panel.id || panel.className)"""
HOSTILE = "<img src=x onerror=alert(1)>"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.asyncio(loop_scope="module"),  # the browser is started once
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as driver:
        started = await driver.chromium.launch(executable_path=CHROMIUM, timeout=TIMEOUT_MS)
        yield started
        await started.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def opened(browser: Browser, url, *, allowed=(), **options) -> AsyncIterator[Page]:
    """The page; afterwards nothing but the allowed complaints may stand in the console."""
    context = await browser.new_context(**options)
    context.set_default_timeout(TIMEOUT_MS)
    page = await context.new_page()
    complaints: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
    await page.goto(url)
    yield page
    await context.close()
    assert [text for text in complaints if not any(part in text for part in allowed)] == []


async def hold(page, url) -> asyncio.Event:
    """Keep requests to ``url`` back until the event is set."""
    released = asyncio.Event()

    async def wait(route):
        await released.wait()
        await route.continue_()

    await page.route(url, wait)
    return released


async def chat(page, text):
    """Send a message by the keyboard and return the bubble of the answer, once its facts are shown."""
    await page.fill("#message", text)
    await page.press("#message", "Enter")
    answer = page.locator(".message.assistant").last
    await answer.locator(".facts:not(:empty)").wait_for()
    return answer


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_nothing_overflows_and_tiles_get_numbers(browser, folder, scheme):
    sizes = [{"width": width, "height": 800} for width in (360, 390, 1280)]
    async with running(folder) as stack:
        await stack.pair()
        async with opened(browser, stack.url, viewport=sizes[0], color_scheme=scheme) as page:
            await page.locator(".node").nth(1).wait_for()
            answer = await chat(page, "a" * 60 + " and words")
            await answer.locator(".span").first.wait_for()
            await page.locator("#requests-body button").first.click()
            await page.locator(".timeline-row .span").first.wait_for()
            await page.wait_for_function(
                "() => document.querySelector('.tile:nth-child(3) .headline').textContent !== '–'"
            )
            assert await page.locator(".tile .headline").count() == 6
            for size in (*sizes, sizes[0]):  # wider, and narrow again
                await page.set_viewport_size(size)
                assert await page.evaluate("innerWidth") == size["width"]
                assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


async def test_long_names_do_not_widen_the_page(browser, folder):
    name, tool = "n" * 120, "f" * 120
    async with running(folder, fields={"formats": TOY_FORMATS}) as stack:
        prefill, decode = await stack.node("prefill", name), await stack.node("decode", name + "2")
        answers(stack, f'[{tool}|{{"city":"Ulm"}}]')
        decode.send(Pairs((PairState(name, prefill.incarnation, "shm", ""),)))
        async with opened(browser, stack.url) as page:
            await page.locator(".pair").first.wait_for()
            await page.locator("#settings > summary").click()
            await page.fill("#tools", json.dumps([{"type": "function", "function": {"name": tool}}]))
            await chat(page, "Weather?")
            await page.locator(".call strong").wait_for()
            await page.locator("#requests-body button").first.click()
            await page.locator(".timeline-row .waterfall, .timeline-row .empty").first.wait_for()
            for width in (360, 1000, 1110, 1280):
                await page.set_viewport_size({"width": width, "height": 800})
                assert await page.evaluate("innerWidth") == width
                assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
                assert await page.evaluate(OVERFLOWING) == []


async def test_an_answer_streams_to_its_end_and_shows_its_waterfall(browser, folder):
    async with running(folder) as stack:
        prefill, decode = await stack.pair()
        release = asyncio.Event()

        def begin(node, generate):
            node.spans(generate.rid, StageSpan("prefill_queue", 1.0, 0.25), StageSpan("prefill", 1.25, 0.5, 3))
            node.tokens(generate.rid, 0, ids_of("x"))

        async def finish(rid):
            await release.wait()
            decode.tokens(rid, 1, ids_of("yz"), finish="length")

        tasks = []
        prefill.on_generate = begin
        decode.on_generate = lambda node, generate: tasks.append(asyncio.ensure_future(finish(generate.rid)))
        async with opened(browser, stack.url) as page:
            await page.locator(".idea").first.wait_for()
            await page.fill("#message", "Hello")
            await page.press("#message", "Enter")
            await page.wait_for_function("() => document.querySelector('.assistant .bubble')?.textContent === 'x'")
            assert await page.locator("#stop").is_visible()
            release.set()
            await page.wait_for_function("() => document.querySelector('.assistant .bubble').textContent === 'xyz'")
            spans = page.locator(".where .span-name b")
            await spans.first.wait_for()
            assert {"queue", "prefill_queue", "prefill"} <= set(await spans.all_inner_texts())
            assert "Hello" in await page.locator("#curl-text").text_content()
            assert stack.url in await page.locator("#curl-text").text_content()


async def test_the_stop_button_ends_the_request_at_the_nodes(browser, folder):
    async with running(folder) as stack:
        prefill, decode = await stack.pair()
        prefill.on_generate = lambda node, generate: node.tokens(generate.rid, 0, ids_of("x"))
        decode.on_generate = silent
        async with opened(browser, stack.url) as page:
            await page.locator(".idea").first.wait_for()
            await page.fill("#message", "Hello")
            await page.press("#message", "Enter")
            await page.wait_for_function("() => document.querySelector('.assistant .bubble')?.textContent === 'x'")
            await page.locator("#stop").click()
            await decode.until(lambda: decode.aborts)
            await page.get_by_text("stopped by you").wait_for()


@contextlib.asynccontextmanager
async def opened_with_tools(browser, stack):
    """The page with the example of tools in its settings."""
    async with opened(browser, stack.url) as page:
        await page.locator(".idea").first.wait_for()
        await page.locator("#settings > summary").click()
        await page.locator("#tools-example").click()
        yield page


async def test_reasoning_is_folded_and_the_result_of_a_tool_goes_back(browser, folder):
    async with toy_stack(folder) as stack:
        answers(stack, '(secret thought)Look:[get_weather|{"city":"Ulm"}]')
        async with opened_with_tools(browser, stack) as page:
            answer = await chat(page, "Weather?")
            assert not await answer.get_by_text("secret thought").is_visible()
            await answer.locator(".reasoning summary").click()
            assert await answer.get_by_text("secret thought").is_visible()
            assert await answer.locator(".call strong").inner_text() == "get_weather"
            assert json.loads(await answer.locator(".call pre").inner_text()) == {"city": "Ulm"}
            answers(stack, "It rains.")
            await answer.locator(".call textarea").fill("rain, 8 degrees")
            await answer.get_by_role("button", name="Send the result back").click()
            await page.get_by_text("It rains.").wait_for()
            assert "rain, 8 degrees" in last_prompt(stack)


async def test_the_result_of_a_tool_is_not_sent_once_the_conversation_has_gone_on(browser, folder):
    async with toy_stack(folder) as stack:
        answers(stack, '[get_weather|{"city":"Ulm"}]')
        async with opened_with_tools(browser, stack) as page:
            await chat(page, "Weather?")
            answers(stack, "As you like.")
            await chat(page, "Never mind.")
            await page.get_by_role("button", name="Send the result back").click()
            await page.get_by_text("The conversation has gone on without these results.").wait_for()
            assert await page.get_by_role("button", name="Send the result back").count() == 0
            assert await page.locator(".message").count() == 4


async def test_a_message_is_sent_only_once_the_models_are_known(browser, tmp_path):
    model = make_model_folder(tmp_path)
    (model / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')  # no chat template
    async with running(model) as stack:
        await stack.pair()
        async with opened(browser, stack.url) as page:
            typed = await hold(page, "**/v1/live")
            await page.reload(wait_until="commit")
            await page.fill("#message", "Shall I")
            await page.get_by_role("button", name="Send", exact=True).click()
            await page.get_by_text("The models are not known yet").wait_for()
            typed.set()
            await page.locator(".idea").first.wait_for()
            assert await page.input_value("#message") == "Shall I"
            await page.press("#message", "Enter")
            answer = page.locator(".message.assistant").last
            await answer.locator(".facts:not(:empty)").wait_for()
            assert (await answer.locator(".bubble").inner_text()).startswith("Shall I")


async def test_a_message_typed_before_the_script_runs_is_kept(browser, folder):
    async with running(folder) as stack:
        await stack.pair()
        async with opened(browser, stack.url) as page:
            typed = await hold(page, "**/static/playground.js")
            await page.reload(wait_until="commit")
            await page.fill("#message", "Hello")
            send = page.get_by_role("button", name="Send", exact=True)
            assert await send.is_disabled()
            typed.set()
            await page.locator(".idea").first.wait_for()
            await send.click()
            await page.locator(".message.assistant .facts:not(:empty)").wait_for()


async def test_tools_that_are_no_json_are_refused_with_a_sentence(browser, folder):
    async with running(folder) as stack:
        await stack.pair()
        async with opened(browser, stack.url) as page:
            await page.locator(".idea").first.wait_for()
            await page.locator("#settings > summary").click()
            await page.fill("#tools", "{")
            await page.fill("#message", "Hello")
            await page.press("#message", "Enter")
            await page.get_by_text("Tools: this is not JSON").wait_for()


async def test_a_model_without_a_chat_template_continues_the_text(browser, tmp_path):
    model = make_model_folder(tmp_path)
    (model / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    async with running(model) as stack:
        await stack.pair()
        async with opened(browser, stack.url) as page:
            await page.get_by_text("no chat template").wait_for(state="attached")
            answer = await chat(page, "Shall I")
            assert (await answer.locator(".bubble").inner_text()).startswith("Shall I")
            assert "/v1/completions" in await page.locator("#curl-text").text_content()


async def test_the_keyboard_reaches_everything(browser, folder):
    async with running(folder) as stack:
        await stack.pair()
        async with opened(browser, stack.url) as page:
            await page.locator(".idea").first.wait_for()
            await chat(page, "abc")
            await page.locator("#requests-body button").first.wait_for()
            await page.evaluate("document.activeElement.blur()")
            reached = set()
            for _ in range(40):
                await page.keyboard.press("Tab")
                reached.add(await page.evaluate("document.activeElement.id || document.activeElement.className"))
            assert {"skip", "theme-button", "log", "message", "send", "rid"} <= reached
            button = page.locator("#requests-body button").first
            await button.focus()
            await page.keyboard.press("Enter")
            await page.locator(".timeline-row .span").first.wait_for()
            assert await page.locator('#requests-body [aria-expanded="true"]').count() == 1


CONTRAST = """() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const luminance = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    const part = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    return a === 255 ? 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b) : null;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = luminance(getComputedStyle(at).backgroundColor);
      if (found !== null) return found;
    }
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!hasText || !node.checkVisibility({ visibilityProperty: true })) continue;
    if (node.closest(":disabled, .is-empty")) continue;
    const [front, back] = [luminance(getComputedStyle(node).color), behind(node)];
    const contrast = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (contrast < 4.5) low.push(`${node.className || node.tagName}: ${contrast.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_stands_out_from_its_background(browser, folder, scheme):
    async with running(folder) as stack:
        await stack.pair()
        async with opened(browser, stack.url, color_scheme=scheme) as page:
            await page.locator(".idea").first.wait_for()
            answer = await chat(page, "abc")
            await answer.locator(".span").first.wait_for()
            await page.locator("#requests-body button").first.wait_for()
            assert await page.evaluate(CONTRAST) == []
            await page.locator("#theme-button").click()
            assert await page.evaluate("document.documentElement.dataset.theme") != scheme
            assert await page.evaluate(CONTRAST) == []


async def test_names_that_look_like_html_stay_text(browser, folder):
    async with running(folder) as stack:
        prefill = await stack.node("prefill", HOSTILE, device=HOSTILE)
        decode = await stack.node("decode", HOSTILE + "2")
        problem = f"no route: {HOSTILE}"
        decode.send(Pairs((PairState(HOSTILE, prefill.incarnation, "shm", HOSTILE, problem),)))
        async with opened(browser, stack.url) as page:
            await page.locator(".node").nth(1).wait_for()
            await page.get_by_text(problem).first.wait_for()
            assert HOSTILE in await page.locator(".node-name").all_inner_texts()
            decode.send(Pairs((PairState(HOSTILE, prefill.incarnation, "shm", HOSTILE),)))
            await page.wait_for_function("() => !document.querySelector('.pair.failed')")
            for node in (prefill, decode):
                node.on_generate = echo
            body = {"text": HOSTILE, "rid": HOSTILE, "sampling_params": {"max_new_tokens": 2}}
            assert (await stack.post("/generate", body))[0] == 200
            await page.locator("#requests-body button").first.click()
            await page.locator(".timeline-row .span").first.wait_for()
            assert await page.locator("#requests-body button").first.inner_text() == HOSTILE
            await chat(page, HOSTILE)
            assert await page.locator(".user .bubble").inner_text() == HOSTILE
            assert await page.locator("img").count() == 0


async def test_a_failed_pair_shows_its_reason(browser, folder):
    async with running(folder) as stack:
        prefill, decode = await stack.pair()
        decode.send(Pairs((PairState("prefill", prefill.incarnation, "shm", "", "another user's memory"),)))
        async with opened(browser, stack.url) as page:
            await page.get_by_text("prefill: shm failed: another user's memory").wait_for()
            await page.get_by_text("can exchange pages with no node").first.wait_for()
            assert await page.locator(".link.failed").count() == 1
            assert "1 of them failed" in await page.locator("#nodes-note").inner_text()


async def test_pages_that_requests_hold_are_in_use_although_the_cache_has_them(browser, folder):
    """Of 64 pages, 10 are free, and 50 are cached, of which requests hold 40."""
    async with running(folder) as stack:
        _, decode = await stack.pair()
        pool = Heartbeat(0, 2, 10, 50, 0, {}, {"evictable_pages": 10.0})
        decode.beat = lambda **counters: decode.send(pool)
        async with opened(browser, stack.url) as page:
            shown = page.locator("#decodes .pool tbody tr")
            await shown.filter(has_text="in use44").wait_for()
            rows = [await row.locator("th, td").all_inner_texts() for row in await shown.all()]
            assert [row[:2] for row in rows] == [["in use", "44"], ["cached", "10"], ["free", "10"]]


async def test_rates_of_nodes_are_over_the_time_between_two_heartbeats(browser, folder):
    """Each answer has a heartbeat that is 1,000 s younger than the last one, and 100,000 tokens more."""
    numbers = itertools.count()

    async def age(route):
        answer, number = await route.fetch(), next(numbers)
        content = await answer.json()
        for worker in content["workers"]:
            worker["seen_s_ago"] = 1000.0 * (1000 - number)
            if worker["heartbeat"]:
                worker["heartbeat"]["counters"] = {"output_tokens": 100_000.0 * number}
        await route.fulfill(response=answer, json=content)

    async with running(folder) as stack:
        await stack.pair()
        async with opened(browser, stack.url) as page:
            await page.route("**/v1/workers", age)
            await page.reload()
            await page.get_by_text(re.compile(r"^(100|9\d) output tokens/s$")).wait_for()
            await page.unroute_all(behavior="ignoreErrors")


async def test_a_lost_connection_is_shown_and_ends(browser, folder):
    async with running(folder) as stack:
        await stack.pair()
        async with opened(browser, stack.url, allowed=("ERR_INTERNET_DISCONNECTED",)) as page:
            await page.locator(".node").nth(1).wait_for()
            await page.context.set_offline(True)
            await page.get_by_text("No connection to the gateway").wait_for()
            await page.context.set_offline(False)
            await page.locator("#lost").wait_for(state="hidden")
            await page.wait_for_function("() => document.querySelector('#state-text').textContent === 'Ready'")


async def test_the_page_asks_for_a_key_and_keeps_it_in_the_tab(browser, folder):
    async with running(folder, api_key="secret-key") as stack:
        await stack.pair()
        async with opened(browser, stack.url, allowed=("401", "ERR_INTERNET_DISCONNECTED")) as page:
            await page.locator("#key").wait_for()
            await page.context.set_offline(True)
            await page.get_by_text(re.compile(r"No connection to the gateway for \d+ s\.")).wait_for()
            await page.context.set_offline(False)
            await page.locator("#lost").wait_for(state="hidden")
            await page.fill("#key", "wrong")
            await page.keyboard.press("Enter")
            await page.get_by_text("does not know this key").wait_for()
            await page.fill("#key", "secret-key")
            await page.keyboard.press("Enter")
            await page.locator(".node").nth(1).wait_for()
            await chat(page, "abc")
            assert "secret-key" not in await page.locator("#curl-text").text_content()
            assert await page.evaluate("localStorage.length") == 0


async def test_a_page_without_nodes_says_what_to_do(browser, folder):
    async with running(folder) as stack, opened(browser, stack.url, allowed=("503",)) as page:
        await page.get_by_text("No prefill node has registered").wait_for()
        assert await page.locator("#state-text").inner_text() == "Waiting for nodes"
        await page.locator(".idea").first.click()
        await page.locator(".assistant .problem").wait_for()


@pytest.mark.parametrize("width", [360, 1280])
async def test_the_description_of_the_api_is_drawn_without_other_servers(browser, folder, width):
    size = {"width": width, "height": 800}
    async with (
        running(folder, api_key="secret-key") as stack,
        opened(browser, stack.url, viewport=size, allowed=("401",)) as page,
    ):
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        typed = asyncio.Event()

        async def answer_late(route):
            await typed.wait()
            await route.continue_()

        await page.route("**/openapi.json", answer_late)
        await page.goto(f"{stack.url}/docs", wait_until="commit")
        await page.fill("#filter", "answer a chat (openai)")
        typed.set()
        operation = page.locator(".operation:visible")
        await operation.first.wait_for()
        assert await operation.count() == 1
        await page.fill("#filter", "")
        assert await operation.count() > 10
        await page.fill("#filter", "answer a chat (openai)")
        await operation.locator("summary").first.click()
        await operation.get_by_text("messages", exact=True).first.wait_for()
        await operation.locator(".nested > summary").first.click()
        await operation.locator(".nested .field-name").first.wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert all(url.startswith(stack.url) for url in requested)
