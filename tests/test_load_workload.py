"""What a run consists of, and the bodies that come of it."""

import itertools
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cli import parse
from common.errors import ConfigError
from scripts.load.config import LoadtestConfig, seconds
from scripts.load.lengths import parse_lengths
from scripts.load.plan import ANSWER, UNIQUE, Planned, ideal_cached, key
from scripts.load.prompts import Prompts
from scripts.load.workload import Chain, drawn_chains, kinds_of, make_plan, rng_of


def chains(count: int, **options: object) -> list[Chain]:
    config = LoadtestConfig(**options)  # type: ignore[arg-type]
    return list(itertools.islice(drawn_chains(config, kinds_of(config)), count))


def prompts(**options: object) -> Prompts:
    values = {"seed": 1, "vocab": (10, 1000), "endpoint": "completions"} | options
    return Prompts(**values)  # type: ignore[arg-type]


def test_lengths_are_what_they_are_called() -> None:
    rng = rng_of(0)
    assert parse_lengths("7", "--x").draw(rng, 3).tolist() == [7, 7, 7]
    uniform = parse_lengths("uniform:3:5", "--x").draw(rng, 1000)
    assert set(uniform.tolist()) == {3, 4, 5}
    lognormal = parse_lengths("lognormal:200:0.5:max=300", "--x").draw(rng, 4000)
    assert 190 < float(sorted(lognormal)[2000]) < 210
    assert lognormal.max() == 300
    assert parse_lengths("normal:2:50", "--x").draw(rng, 100).min() >= 1


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "l").write_text("5\n6\n")
    assert set(parse_lengths(f"file:{tmp_path / 'l'}", "--x").draw(rng_of(0), 100).tolist()) == {5, 6}


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "uniform:5:3", "uniform:1", "zipf:1:2", "file:/none", "nan"])
def test_lengths_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--input-len"):
        parse_lengths(text, "--input-len")


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    shared = {"input_len": "uniform:1:99", "turns": "uniform:1:3", "seed": 4}
    assert chains(10, **shared) == chains(600, **shared)[:10]
    assert chains(10, **shared) != chains(10, **shared | {"seed": 5})


def test_a_mix_draws_classes_by_share_with_their_own_lengths_and_fields() -> None:
    mix = "chat:share=3,input=20,priority=2,deadline=1.5s,tenant=a,slo-ttft=80ms; batch:input=uniform:50:60,output=1"
    drawn = [chain[0] for chain in chains(2000, mix=mix, output_len="9")]
    chat = [one for one in drawn if one.class_name == "chat"]
    batch = [one for one in drawn if one.class_name == "batch"]
    assert len(chat) == pytest.approx(1500, abs=100) and len(chat) + len(batch) == 2000
    assert {(one.num_input, one.num_output, one.priority, one.deadline_ms, one.tenant) for one in chat} == {
        (20, 9, 2, 1500.0, "a")
    }
    assert {one.num_output for one in batch} == {1} and {one.priority for one in batch} == {None}
    assert {50 <= one.num_input <= 60 for one in batch} == {True}
    assert dict(kinds_of(LoadtestConfig(mix=mix))["chat"].slos) == {"ttft": 0.08}


@pytest.mark.parametrize(
    "mix",
    ["x", ":share=1", "a:share=0", "a:colour=red", "a:input=0", "a:share=1;a:share=2", "a:groups=0", "a:prefix=-1"],
)
def test_a_mix_that_cannot_be_is_refused(mix: str) -> None:
    if mix == "x":  # a class with nothing of its own
        assert list(kinds_of(LoadtestConfig(mix=mix))) == ["x"]
        return
    with pytest.raises(ConfigError, match="--mix"):
        kinds_of(LoadtestConfig(mix=mix))


def test_equal_pieces_have_equal_tokens_and_a_shorter_one_is_a_prefix() -> None:
    made = prompts()
    piece = key(UNIQUE, 5)
    long = made.tokens((piece, 100))
    assert made.tokens((piece, 37)) == long[:37]
    assert prompts().tokens((piece, 100)) == long
    assert prompts(seed=2).tokens((piece, 100)) != long
    assert made.tokens((key(UNIQUE, 6), 100)) != long
    assert all(10 <= token < 1000 for token in long)


def test_the_prompt_of_a_turn_begins_with_all_of_the_turn_before() -> None:
    (chain,) = chains(1, turns="3", input_len="5", output_len="4", prefix_len=3)
    made = prompts()
    bodies = [json.loads(made.body(planned))["prompt"] for planned in chain]
    assert [len(body) for body in bodies] == [8, 17, 26]
    assert bodies[1][:8] == bodies[0] and bodies[2][:17] == bodies[1]
    assert [planned.turns_left for planned in chain] == [2, 1, 0]
    assert [planned.think_s for planned in chain] == [-1, 0, 0]


def test_bodies_speak_each_dialect() -> None:
    planned = Planned(
        0, 0.0, ((key(UNIQUE, 0), 3),), 7, tenant="t", priority=1, deadline_ms=50.0, priority_class="high"
    )
    body = json.loads(prompts(model="m", with_ids=True).body(planned))
    assert len(body.pop("prompt")) == 3
    assert body == {
        "max_tokens": 7, "temperature": 0, "stream": True, "model": "m", "stream_options": {"include_usage": True},
        "ignore_eos": True, "return_token_ids": True, "user": "t", "priority": 1, "deadline_ms": 50.0,
        "priority_class": "high",
    }  # fmt: skip
    native = json.loads(prompts(endpoint="generate").body(planned))
    assert len(native["input_ids"]) == 3 and native["sampling_params"]["max_new_tokens"] == 7
    plain = json.loads(prompts(ignores_eos=False, is_stream=False, common={"top_p": 0.5}).body(planned))
    assert "ignore_eos" not in plain and "stream_options" not in plain and plain["top_p"] == 0.5


def test_chat_makes_words_and_gives_answers_to_the_assistant() -> None:
    planned = Planned(0, 0.0, ((key(UNIQUE, 0), 3), (key(ANSWER, 0), 2), (key(UNIQUE, 1), 4)), 7)
    messages = json.loads(prompts(endpoint="chat").body(planned))["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert [len(message["content"].split()) for message in messages] == [3, 2, 4]


def test_ones_own_prompt_and_fields_win() -> None:
    planned = Planned(0, 0.0, (), 7, extra={"prompt": "Once", "temperature": 0.5})
    body = json.loads(prompts().body(planned))
    assert (body["prompt"], body["temperature"], body["max_tokens"]) == ("Once", 0.5, 7)


@given(st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=5), max_size=12))
def test_the_ideal_cache_holds_the_longest_common_prefix_with_anything_before(
    rows: list[list[tuple[int, int]]],
) -> None:
    plan = [Planned(number, 0.0, tuple(pieces), 1) for number, pieces in enumerate(rows)]

    def spelled(planned: Planned) -> list[tuple[int, int]]:
        return [(piece, position) for piece, length in planned.pieces for position in range(length)]

    expected = []
    for number, planned in enumerate(plan):
        own = spelled(planned)
        common = [
            len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(own, spelled(other), strict=False))))
            for other in plan[:number]
        ]
        expected.append(min(max(common, default=0), len(own) - 1))
    # A piece after a shorter one of the same key is another position there: only compare where that cannot be.
    if all(len({piece for piece, _ in row}) == len(row) for row in rows) and _lengths_agree(rows):
        assert ideal_cached(plan) == expected
    assert all(0 <= cached < planned.num_input for cached, planned in zip(ideal_cached(plan), plan, strict=True))


def _lengths_agree(rows: list[list[tuple[int, int]]]) -> bool:
    """Every piece but the last of a row has one length, as in all workloads."""
    lengths: dict[int, int] = {}
    return all(lengths.setdefault(piece, length) == length for row in rows for piece, length in row)


def test_without_any_limit_sixty_requests_are_sent_and_steps_end_with_their_last() -> None:
    assert make_plan(LoadtestConfig()).num_chains == 60
    assert make_plan(LoadtestConfig(rate="2x3,4x2", arrival="constant")).num_chains == 14
    assert make_plan(LoadtestConfig(concurrency=3, duration="1s")).num_chains is None


def test_a_huge_plan_begins_at_once_and_is_the_same_as_one_made_whole() -> None:
    options = {"num_requests": 300_000, "rate": "1000", "turns": "2"}
    began_at = time.monotonic()
    plan = make_plan(LoadtestConfig(**options))
    made_s = time.monotonic() - began_at
    first, late = next(iter(plan.chains)), next(itertools.islice(plan.chains, 11_000, None))
    assert plan.num_chains == 300_000 and plan.seconds == pytest.approx(300, rel=0.01)
    assert made_s < 3, "all of it takes 15 s and more"
    whole = chains(11_002, turns="2")
    assert [one.pieces for one in first] == [one.pieces for one in whole[0]]
    assert [one.pieces for one in late] == [one.pieces for one in whole[11_001]]
    assert 10 < late[0].at < 12, "at its instant of the schedule"


@pytest.mark.parametrize(("text", "expected"), [("1", 1), ("200ms", 0.2), ("1.5m", 90), ("5us", 5e-6), (".5s", 0.5)])
def test_durations_have_units(text: str, expected: float) -> None:
    assert seconds(text, "--x") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rate", "1", "--concurrency", "2"], "choose one"),
        (["--duration", "soon"], "--duration must be seconds"),
        (["--find-goodput"], "needs at least one of --slo"),
        (["--time-scale", "2"], "need --trace"),
        (["--trace", "x", "--turns", "2"], "brings its own"),
        (["--url", "ftp://x"], "--url must be"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--header", "X"], "NAME: VALUE"),
        (["--trace-window", "5:1", "--trace", "x"], "--trace-window"),
        (["--arrival", "sometimes"], "must be one of"),
        (["--tokenizer", "x"], "--prompt text"),
        (["--url", "http://x:port"], "--url must be"),
        (["--scrape", "metrics"], "--scrape"),
        (["--clients", "4", "--concurrency", "2"], "--clients 4 is more than --concurrency 2"),
        (["--cv", "3"], "--cv needs --arrival gamma"),
        (["--burst-size", "3"], "--burst-size needs --arrival burst"),
        (["--concurrency", "2", "--arrival", "burst"], "--arrival needs an open loop"),
        (["--prefix-groups", "3"], "--prefix-groups needs --prefix-len"),
        (["--think", "3s"], "--think needs --turns"),
        (["--trace-unit", "ms"], "--trace-unit needs --trace"),
        (["--trace", "x", "--input-len", "9"], "brings its own lengths"),
        (["--api-key", "a\nHost: b"], "--api-key holds"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(LoadtestConfig, words, command="loadtest")


def test_its_variables_have_a_prefix_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_LOADTEST_SEED", "5")
    monkeypatch.setenv("BATON_MODEL", "of another command")
    config = parse(LoadtestConfig, [], command="loadtest")
    assert (config.seed, config.model) == (5, None)
    monkeypatch.setenv("BATON_LOADTEST_SPEED", "5")
    with pytest.raises(ConfigError, match="BATON_LOADTEST_SPEED"):
        parse(LoadtestConfig, [], command="loadtest")
