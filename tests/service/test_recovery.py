"""Nodes are killed and frozen while requests of every kind run: each ends in the tokens of the undisturbed run."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
from support.service.client import Client, prompt_of
from support.service.service import Service, running

NODE_TIMEOUT_S = 5.0
NODE_OPTIONS = {"chunked_prefill_size": 16, "max_total_tokens": 16384, "node_timeout": NODE_TIMEOUT_S}
#: So many that some are left when a node is killed, although this process may have no core for some time.
NUM_TOKENS = 240
#: Of a kill that comes too late to meet a request, since this process had no core.
NUM_TRIES = 5

#: Sampling parameters of SGLang by what they exercise.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 11},
    "penalties": {
        "temperature": 0.8,
        "sampling_seed": 12,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "grammar": {"temperature": 1.0, "sampling_seed": 13, "regex": "([a-z]{3} [0-9]{2}, ){30}", "ignore_eos": False},
    "stop strings": {"temperature": 1.0, "sampling_seed": 14, "stop": ["\n\n", " the ", "e, "], "ignore_eos": False},
}


def bodies(length: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """A path and a body for each kind of request, streamed and not, with prompts of about ``length`` tokens."""
    found: list[tuple[str, dict[str, Any]]] = []
    for number, sampling in enumerate(KINDS.values()):
        for is_stream in (True, False):
            body = {
                "input_ids": prompt_of(length, seed + number),
                "sampling_params": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, **sampling},
                "return_logprob": True,
                "top_logprobs_num": 2,
                "stream": is_stream,
            }
            found.append(("/generate", body))
    samples = {"prompt": prompt_of(length, seed + 50), "max_tokens": NUM_TOKENS, "n": 2, "seed": 5, "temperature": 0.9}
    found.append(("/v1/completions", {**samples, "ignore_eos": True, "logprobs": 1}))
    found.append(("/v1/completions", {**samples, "max_tokens": 1}))  # for a prefill node alone
    return found


async def ask(client: Client, path: str, body: dict[str, Any], progress: list[int]) -> Any:
    """The answer without ids and times; of a stream, all events, each of which repeats what was there before."""
    async with client.session.post(path, json=body) as answer:
        if not body.get("stream"):
            data = await answer.json()
            assert answer.status == 200, data
            return essence(data)
        assert answer.status == 200, await answer.text()
        events = []
        async for event in events_of(answer):
            progress[0] += 1
            assert b'"error"' not in event, event
            events.append(event)
    outputs = [msgspec.json.decode(event) for event in events]
    ids: list[int] = []
    for output in outputs:
        assert output["output_ids"][: len(ids)] == ids, "a token came twice or was changed"
        ids = output["output_ids"]
    return essence(outputs[-1])


async def events_of(answer: Any) -> AsyncIterator[bytes]:
    async for line in answer.content:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield line[6:].strip()


def essence(answer: dict[str, Any]) -> Any:
    """What must be equal: texts, tokens, causes and usage; and the log-probabilities, but for rounding."""
    if "choices" in answer:
        usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        exact = [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]], usage
        logprobs = [
            value for one in answer["choices"] if one["logprobs"] for value in one["logprobs"]["token_logprobs"]
        ]
    else:
        meta = answer["meta_info"]
        counts = [meta[name] for name in ("finish_reason", "prompt_tokens", "completion_tokens")]
        exact = answer["text"], [answer["output_ids"], counts]
        logprobs = [value for value, *_ in meta["output_token_logprobs"]]
    return exact, logprobs


def assert_equal(answers: list[Any], wanted: list[Any]) -> None:
    assert [exact for exact, _ in answers] == [exact for exact, _ in wanted]
    for (_, logprobs), (_, wanted_logprobs) in zip(answers, wanted, strict=True):
        assert logprobs == pytest.approx(wanted_logprobs, abs=1e-3)


class Load:
    """One request of each kind under way."""

    def __init__(self, client: Client, length: int, seed: int) -> None:
        self.progress = [0]
        self.client = client
        calls = [ask(client, path, body, self.progress) for path, body in bodies(length, seed)]
        self.tasks = [asyncio.ensure_future(call) for call in calls]

    async def answers(self) -> list[Any]:
        return list(await asyncio.wait_for(asyncio.gather(*self.tasks), 300))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                assert not all(task.done() for task in self.tasks), "all ended before"
                await asyncio.sleep(0.005)

    async def until_counted(self, role: str, counter: str, start: dict[str, dict[str, float]]) -> None:
        """Wait until a counter of a node of this role has risen."""
        async with asyncio.timeout(120):
            while True:
                counted = await self.client.counters()
                if any(counted[name][counter] > start[name][counter] for name in counted if name.startswith(role)):
                    return


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = {"node_timeout": NODE_TIMEOUT_S}
    folder = tmp_path_factory.mktemp("recovery")
    with running(folder, prefill=2, decode=2, node_options=NODE_OPTIONS, gateway_options=options) as started:
        yield started


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], list[Any]]:
    """Answers of the undisturbed run, by length and seed of the prompts."""
    return {}


async def undisturbed(client: Client, expected: dict[tuple[int, int], list[Any]], length: int, seed: int) -> list[Any]:
    if (length, seed) not in expected:
        expected[length, seed] = await Load(client, length, seed).answers()
    async with client.session.post("/flush_cache") as answer:
        assert answer.status == 200
    return expected[length, seed]


async def bring_back(service: Service) -> None:
    """Start what is dead, and wait until all nodes are registered."""
    if missing := [name for name in service.nodes if name not in service.processes]:
        service.start(*missing)
    await asyncio.to_thread(service.wait_until_ready)


async def num_attempts(client: Client) -> int:
    """The most attempts that one of the last requests has had."""
    async with client.session.get("/v1/requests?limit=20") as answer:
        return max(one["num_attempts"] for one in (await answer.json())["requests"])


@pytest.mark.slow(sample=0.1)
@pytest.mark.parametrize("victims", [("prefill-0",), ("decode-0",), ("prefill-1", "decode-1")], ids="+".join)
@pytest.mark.parametrize("moment", ["computing", "transfer", "decoding"])
async def test_after_a_kill_every_answer_is_that_of_the_undisturbed_run(
    service: Service, expected: dict[tuple[int, int], list[Any]], victims: tuple[str, ...], moment: str
) -> None:
    length = 40 if moment == "decoding" else 700
    is_needed = victims != ("prefill-0",) or moment != "decoding"  # decode nodes need no prefill node any more
    for _ in range(NUM_TRIES):
        await bring_back(service)
        async with service.client() as client:
            wanted = await undisturbed(client, expected, length, 1000)
            start = await client.settled()
            load = Load(client, length, 1000)
            if moment == "decoding":
                await load.until(lambda load=load: load.progress[0] >= 60)
            else:
                counter = "prompt_tokens_computed" if moment == "computing" else "pages_sent"
                await load.until_counted("prefill", counter, start)
            service.kill(*victims)
            assert_equal(await load.answers(), wanted)
            has_continued = await num_attempts(client) > 1
            await bring_back(service)
            await client.settled()
        if has_continued or not is_needed:
            return
    raise AssertionError(f"in {NUM_TRIES} tries no request was at {', '.join(victims)} any more")


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("victim", [pytest.param("prefill-0", marks=pytest.mark.slow), "decode-1"])
async def test_after_a_hang_every_answer_is_that_of_the_undisturbed_run_and_the_node_comes_back(
    service: Service, expected: dict[tuple[int, int], list[Any]], victim: str
) -> None:
    await bring_back(service)
    async with service.client() as client:
        wanted = await undisturbed(client, expected, 40, 1000)
        load = Load(client, 40, 1000)
        await load.until(lambda: load.progress[0] >= 30)
        service.pause(victim)
        try:
            answers = await load.answers()
        finally:
            service.resume(victim)
        assert_equal(answers, wanted)
        await bring_back(service)
        await client.settled()


@pytest.mark.slow
async def test_without_another_node_the_stream_goes_on_when_the_node_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with running(tmp_path_factory.mktemp("one-pair"), node_options=NODE_OPTIONS) as one_pair:
        async with one_pair.client() as client:
            wanted = await Load(client, 40, 1000).answers()
            for victims in (("decode-0",), ("prefill-0", "decode-0")):
                load = Load(client, 40, 1000)
                await load.until(lambda load=load: load.progress[0] >= 60)
                one_pair.kill(*victims)
                await bring_back(one_pair)
                assert_equal(await load.answers(), wanted)
                await client.settled()
