"""Several models behind one gateway, each with its own tokenizer, template, nodes and limits; and cache flushes."""

import asyncio
import json

import pytest
from anthropic.types import ModelInfo as AnthropicModel
from openai.types import Model as OpenAIModel
from support.gateway.fake_nodes import EOS, MODEL, TEMPLATE, make_model_folder, make_tokenizer, running, silent

from common.config.gateway import GatewayConfig
from common.errors import ConfigError
from common.wire.messages import Flush
from gateway.workers.served_models import load_models, model_folders

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model: its tokenizer has one more word, its template writes capitals."""
    path = make_model_folder(tmp_path_factory.mktemp("other"))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["shall-i"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"chat_template": "{{ messages[0]['content'] | upper }}!"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
async def stack(folder, other):
    """Two models: nodes 0 and 1 serve the first, 2 and 3 the other. Requests wait briefly for lost nodes."""
    async with running(folder, also_serve=(f"org/other={other}",), recovery_timeout=0.5) as running_stack:
        await running_stack.pair()
        await running_stack.pair(model="org/other", context_length=100, digest="d2", num_pages=32)
        yield running_stack


async def test_requests_go_to_the_nodes_of_their_model(stack):
    for name, num in ((None, 0), ("", 0), (MODEL, 0), ("org/other", 2)):
        body = {"prompt": "ab", "max_tokens": 2, "model": name}
        status, answer = await stack.post("/v1/completions", body)
        assert (status, answer["model"]) == (200, name or MODEL)
        (generate,) = stack.nodes[num].generates.values()
        assert stack.nodes[num + 1].generates == stack.nodes[num].generates
        assert generate.prefill.incarnation == stack.nodes[num].incarnation
        for node in stack.nodes:
            node.generates.clear()
    status, answer = await stack.post("/v1/completions", {"prompt": "ab", "model": "third"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "'tiny', 'org/other'" in answer["error"]["message"]


async def test_each_model_has_its_own_tokenizer_template_and_limits(stack):
    _, ours = await stack.post("/tokenize", {"prompt": "shall-i"})
    _, theirs = await stack.post("/tokenize", {"prompt": "shall-i", "model": "org/other"})
    assert theirs["count"] == 1 < ours["count"]
    _, text = await stack.post("/detokenize", {"tokens": theirs["tokens"], "model": "org/other"})
    assert text["text"] == "shall-i"
    _, answer = await stack.post("/v1/chat/completions", {"messages": HI, "model": "org/other", "max_tokens": 3})
    assert answer["choices"][0]["message"]["content"] == "HI!"
    for path, body in (("/generate", {"text": "x" * 101}), ("/v1/completions", {"prompt": "x" * 101})):
        assert (await stack.post(path, body))[0] == 200
        status, answer = await stack.post(path, {**body, "model": "org/other"})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_each_model_tells_its_special_tokens_and_its_template(stack):
    """As the remote tokenizer of lm-eval asks for them, which sends ``eos_token`` to ``/tokenize``."""
    _, ours = await stack.get("/tokenizer_info")
    assert (ours["eos_token"], ours["bos_token"], ours["chat_template"]) == (EOS, None, TEMPLATE)
    _, answer = await stack.post("/tokenize", {"prompt": ours["eos_token"], "add_special_tokens": False})
    assert answer["count"] == 1
    _, theirs = await stack.get("/tokenizer_info?model=org/other")
    assert theirs == {
        "bos_token": None, "eos_token": None, "pad_token": None, "unk_token": None,
        "chat_template": "{{ messages[0]['content'] | upper }}!",
    }  # fmt: skip
    status, answer = await stack.get("/tokenizer_info?model=none")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_models_are_listed_and_found_by_name(stack):
    _, answer = await stack.get("/v1/models")
    assert [(model["id"], model["max_model_len"]) for model in answer["data"]] == [(MODEL, 512), ("org/other", 100)]
    for path in ("/v1/models/org/other", "/v1/models/org%2Fother"):
        status, answer = await stack.get(path)
        assert (status, answer["id"], answer["object"]) == (200, "org/other", "model")
    status, answer = await stack.get("/v1/models/none")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = await stack.get("/v1/models/")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert answer["error"]["message"].endswith("did you mean /v1/models?")
    assert (await stack.get("/v1/other/none"))[0] == 404
    _, text = await stack.get("/metrics")
    assert 'baton_http_answers_total{path="/v1/models/*",status="200"} 2.0' in text


async def test_models_have_the_fields_of_both_official_clients(stack):
    _, answer = await stack.get("/v1/models")
    for model in answer["data"]:
        OpenAIModel.model_validate(model, strict=True)
        theirs = AnthropicModel.model_validate(model)
        assert (theirs.display_name, theirs.max_input_tokens) == (model["id"], model["max_model_len"])
    assert (answer["first_id"], answer["last_id"], answer["has_more"]) == (MODEL, "org/other", False)


async def test_a_model_without_nodes_gets_503_and_the_others_serve(stack):
    for node in stack.nodes[:2]:
        await node.kill()
    del stack.nodes[:2]
    while (await stack.post("/v1/completions", {"prompt": "a"}))[0] != 503:
        await asyncio.sleep(0.01)
    assert (await stack.post("/v1/completions", {"prompt": "a", "model": "org/other"}))[0] == 200
    assert await stack.get("/ready") == (200, {"status": "ready", "models": {MODEL: False, "org/other": True}})
    await stack.nodes[0].kill()
    while (await stack.get("/ready"))[0] == 200:
        await asyncio.sleep(0.01)


async def test_only_nodes_of_one_model_must_agree(stack):
    refused = await stack.joining("decode", "d3", model="org/other", context_length=512, digest="d2").until_refused()
    assert "context length" in refused.refusal
    refused = await stack.joining("decode", "d4", model="third").until_refused()
    said = "this gateway serves 'tiny', 'org/other', the node d4 has 'third': give the node one of these names with"
    assert said in refused.refusal
    _, answer = await stack.get("/v1/workers")
    rows = [(worker["model"], worker["role"]) for worker in answer["workers"]]
    assert rows == [(MODEL, "prefill"), (MODEL, "decode"), ("org/other", "prefill"), ("org/other", "decode")]


async def test_each_model_has_its_own_admission_bound(folder, other):
    async with running(folder, also_serve=(f"b={other}",), max_queued_requests=0) as stack:
        for model in (MODEL, "b"):
            await stack.pair(model=model, max_running=1)
        for node in stack.nodes[:2]:
            node.on_generate = silent
        call = asyncio.ensure_future(stack.post("/v1/completions", {"prompt": "a", "max_tokens": 2}))
        await stack.nodes[1].until(lambda: stack.nodes[1].generates)
        assert (await stack.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[0] == 429
        assert (await stack.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "b"}))[0] == 200
        await stack.post("/abort_request", {"abort_all": True})
        assert (await call)[0] == 499


# ---- where the files come from --------------------------------------------------------------------------------------


def config(folder, **values):
    return GatewayConfig(model=str(folder), served_model_name="first", **values)


def test_also_serve_takes_a_folder_or_a_hub_id_with_a_revision(folder, other, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda model, revision, **_: asked.append((model, revision)) or "/fetched",
    )
    found = model_folders(config(folder, also_serve=(f"b={other}", "c=org/name", "d=org/name@v2")))
    assert list(found) == ["first", "b", "c", "d"]
    assert (found["first"], found["b"], str(found["d"])) == (folder, other, "/fetched")
    assert asked == [("org/name", None), ("org/name", "v2")]
    with pytest.raises(ConfigError, match="--also-serve e=/nowhere: no such folder"):
        model_folders(config(folder, also_serve=("e=/nowhere",)))


def test_the_tokenizer_option_replaces_tokenizer_and_template_of_the_first_model(folder, other, tmp_path):
    settings = config(folder, also_serve=(f"b={folder}",), tokenizer=str(other))
    first, second = load_models(settings, model_folders(settings)).values()
    assert first.tokenizer.vocab_size == second.tokenizer.vocab_size + 1
    assert first.chat_template.render(HI) == "HI!"
    with pytest.raises(ConfigError, match=r"--tokenizer .*: there is no tokenizer\.json in"):
        model_folders(config(folder, tokenizer=str(tmp_path)))


def test_the_chat_template_option_applies_to_the_first_model(folder, other, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ eos_token }}{{ messages[0].content }}?")
    settings = config(folder, also_serve=(f"b={other}",), chat_template=str(file))
    models = load_models(settings, model_folders(settings))
    texts = [model.chat_template.render([{"role": "user", "content": "hi"}]) for model in models.values()]
    assert texts == ["<|im_end|>hi?", "HI!"]
    file.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"--chat-template .*own\.jinja does not parse .*, at line 1"):
        load_models(settings, model_folders(settings))
    file.unlink()
    with pytest.raises(ConfigError, match=r"--chat-template .* cannot be read: No such file or directory$"):
        load_models(settings, model_folders(settings))


# ---- caches ---------------------------------------------------------------------------------------------------------


async def test_flush_cache_adds_up_the_pages_of_all_nodes(stack):
    for i, node in enumerate(stack.nodes):
        node.num_cached_pages = 10**i
    for _ in range(2):
        status, answer = await stack.post("/flush_cache", b"")
        assert (status, answer["num_pages"]) == (200, 1111)
        assert [(node["name"], node["num_pages"]) for node in answer["nodes"]] == [
            ("prefill", 1), ("decode", 10), ("prefill", 100), ("decode", 1000),
        ]  # fmt: skip


async def test_concurrent_flushes_all_get_their_answer(stack):
    answers = await asyncio.gather(*(stack.post("/flush_cache", b"") for _ in range(3)))
    assert [(status, answer["num_pages"]) for status, answer in answers] == [(200, 20)] * 3


async def test_a_flush_error_names_the_node_that_does_not_answer(stack, monkeypatch):
    stack.nodes[1].num_cached_pages = None
    with monkeypatch.context() as patch:
        patch.setattr("gateway.http.routes.requests.FLUSH_TIMEOUT_S", 0.5)
        status, answer = await stack.post("/flush_cache", b"")
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert "decode did not answer" in answer["error"]["message"]
    stack.nodes[1].num_cached_pages = 7
    assert (await stack.post("/flush_cache", b""))[1]["num_pages"] == 22


async def test_a_flush_does_not_wait_for_a_node_that_dies(stack, monkeypatch):
    monkeypatch.setattr("gateway.http.routes.requests.FLUSH_TIMEOUT_S", 600.0)
    stack.nodes[1].num_cached_pages = None
    call = asyncio.ensure_future(stack.post("/flush_cache", b""))
    await stack.nodes[1].until(lambda: any(isinstance(message, Flush) for message in stack.nodes[1].received))
    await stack.nodes[1].kill()
    assert (await call)[0] == 504


async def test_a_flush_clears_the_routers_prefixes(folder):
    async with running(folder) as stack:
        prefills = [await stack.node("prefill", f"p{i}") for i in range(2)]
        await stack.node("decode")
        body = {"prompt": [65] * 130, "max_tokens": 1}
        for _ in range(2):
            await stack.post("/v1/completions", body)
        assert [len(node.generates) for node in prefills] == [2, 0]
        assert (await stack.post("/flush_cache", b""))[0] == 200
        await stack.post("/v1/completions", body)
        assert [len(node.generates) for node in prefills] == [2, 1]
