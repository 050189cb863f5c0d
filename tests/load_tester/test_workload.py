"""Plans, and the bodies made from them."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.service.service import SMALL_MODEL

from common.config.cli import parse
from common.errors import ConfigError
from scripts.load_tester.config import LoadtestConfig, parse_seconds
from scripts.load_tester.run import read_tokenizer
from scripts.load_tester.workload import session_sampling
from scripts.load_tester.workload.lengths import parse_lengths
from scripts.load_tester.workload.plan import make_plan
from scripts.load_tester.workload.planned_request import (
    ANSWER,
    UNIQUE,
    PlannedRequest,
    ideal_cached_tokens,
    segment_key,
)
from scripts.load_tester.workload.prompts import WORDS, RequestBodies
from scripts.load_tester.workload.request_classes import mean_load, request_classes_of
from scripts.load_tester.workload.schedule import MAX_REQUESTS
from scripts.load_tester.workload.session_sampling import SampledSessions, Session, SessionSampler, make_rng


def sessions(count: int, **options: object) -> list[Session]:
    config = LoadtestConfig(**options)  # type: ignore[arg-type]
    return list(SampledSessions(config.seed, request_classes_of(config), config.tenants, count=count))


def prompts(**options: object) -> RequestBodies:
    values = {"seed": 1, "vocab": (10, 1000), "endpoint": "completions"} | options
    return RequestBodies(**values)  # type: ignore[arg-type]


def test_each_form_of_lengths_has_its_distribution() -> None:
    rng = make_rng(0)
    assert parse_lengths("7", "--x").draw(rng, 3).tolist() == [7, 7, 7]
    uniform = parse_lengths("uniform:3:5", "--x").draw(rng, 1000)
    assert set(uniform.tolist()) == {3, 4, 5}
    lognormal = parse_lengths("lognormal:200:0.5:max=300", "--x").draw(rng, 4000)
    assert 190 < float(sorted(lognormal)[2000]) < 210
    assert lognormal.max() == 300
    assert parse_lengths("normal:2:50", "--x").draw(rng, 100).min() >= 1


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "l").write_text("5\n6\n")
    assert set(parse_lengths(f"file:{tmp_path / 'l'}", "--x").draw(make_rng(0), 100).tolist()) == {5, 6}


WRONG = ["", "0", "-1", "1.5", "uniform:5:3", "uniform:1", "zipf:1:2", "file:/none", "nan", "uniform:1.5:3", "9:max="]
WRONG += ["9:max=0", "9:max=inf", "10000001", "lognormal:nan:1", "normal:5:inf", "5:6"]


@pytest.mark.parametrize("text", WRONG)
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--input-len"):
        parse_lengths(text, "--input-len")


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "no lengths"), (b"5 x", "else than"), (b"\xff", "else than"), (b"0", "below")]
)
def test_an_invalid_file_of_lengths_is_refused_with_the_reason(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "l").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        parse_lengths(f"file:{tmp_path / 'l'}", "--x")


def test_the_widest_distribution_stays_within_its_bounds() -> None:
    drawn = parse_lengths("lognormal:200:1000000", "--x").draw(make_rng(0), 100)
    assert set(drawn.tolist()) == {1, 10_000_000}


MIXED = {
    "input_len": "uniform:1:99", "output_len": "lognormal:20:1", "turns": "uniform:1:3", "tenants": 5, "seed": 4,
    "mix": "a:share=3,think=2s;b:prefix=7,groups=3,turns=2;c:tenant=own,input=normal:9:3",
}  # fmt: skip


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    assert sessions(10, **MIXED) == sessions(600, **MIXED)[:10]
    assert sessions(10, **MIXED) != sessions(10, **MIXED | {"seed": 5})


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_sampling_in_several_calls_gives_the_same_sessions(counts: list[int]) -> None:
    config = LoadtestConfig(**MIXED)  # type: ignore[arg-type]
    sampler = SessionSampler(4, request_classes_of(config), 5)
    parts = [sampler.take(count) for count in counts]
    whole = SessionSampler(4, request_classes_of(config), 5).take(sum(counts))
    for name in ("request_class", "group", "tenant", "num_input", "num_output", "think_s"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(whole, name).tolist()
    assert [n for part in parts for n in part.first[:-1].tolist()] == whole.first[:-1].tolist()
    assert [part.session for part in parts] == [0, *itertools.accumulate(counts)][:-1]


def test_columns_of_sessions_are_uncorrelated() -> None:
    """Independent samples of 500 have a correlation above 0.2 once in a hundred thousand times."""
    wide = "uniform:1:900"
    options = {"input_len": wide, "output_len": wide, "turns": wide, "prefix_len": 1, "prefix_groups": 900}
    took = SessionSampler(1, request_classes_of(LoadtestConfig(think="1s", mix="a:;b:", **options)), 900).take(1000)  # type: ignore[arg-type]
    turns, at = np.diff(took.first), took.first[:-1]
    columns = [took.num_input[at], took.num_output[at], took.think_s[at], turns, took.group, took.tenant]
    for here in (took.request_class == 0, took.request_class == 1):
        correlations = np.corrcoef([column[here] for column in columns])
        assert np.abs(correlations - np.eye(6)).max() < 0.2
    first, second = (took.num_input[at][took.request_class == number][:400] for number in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.25, "nor does a class about another"


def test_sessions_have_their_own_numbers_turns_pauses_and_groups() -> None:
    drawn = sessions(400, **MIXED)
    assert [one.index for session in drawn for one in session] == list(range(sum(map(len, drawn))))
    for number, session in enumerate(drawn):
        kind = session[0].class_name
        assert {one.session for one in session} == {number if len(session) > 1 else -1}
        assert [one.turn for one in session] == list(range(len(session)))
        assert (session[0].group in (0, 1, 2)) == (kind == "b") and len(session) in {"b": (2,)}.get(kind, (1, 2, 3))
        assert {one.think_s > 0 for one in session[1:]} <= {kind == "a"}
        assert session[0].tenant == "own" or (session[0].tenant[:7] == "tenant-" and kind != "c")
    thinks = [one.think_s for session in sessions(4000, turns="2", think="2s") for one in session[1:]]
    assert sum(thinks) / len(thinks) == pytest.approx(2, rel=0.1)
    assert len(set(thinks)) == 4000
    prefixes = {session[0].segments[0] for session in drawn if session[0].class_name == "b"}
    assert len(prefixes) == 3 and {length for _, length in prefixes} == {7}
    both = sessions(300, mix="x:prefix=7,groups=3;y:prefix=7,groups=3")
    assert len({session[0].segments[0] for session in both}) == 6, "no class shares another's groups"


def test_a_mix_draws_classes_by_share_with_their_own_lengths_and_fields() -> None:
    mix = "chat:share=3,input=20,priority=2,deadline=1.5s,tenant=a,slo-ttft=80ms; batch:input=uniform:50:60,output=1"
    drawn = [session[0] for session in sessions(2000, mix=mix, output_len="9")]
    chat = [one for one in drawn if one.class_name == "chat"]
    batch = [one for one in drawn if one.class_name == "batch"]
    assert len(chat) == pytest.approx(1500, abs=100) and len(chat) + len(batch) == 2000
    assert {(one.num_input, one.num_output, one.priority, one.deadline_ms, one.tenant) for one in chat} == {
        (20, 9, 2, 1500.0, "a")
    }
    assert {one.num_output for one in batch} == {1} and {one.priority for one in batch} == {None}
    assert {50 <= one.num_input <= 60 for one in batch} == {True}
    assert dict(request_classes_of(LoadtestConfig(mix=mix))["chat"].slos) == {"ttft": 0.08}


@pytest.mark.parametrize(
    "mix",
    [
        "x",
        ":share=1",
        "a:share=0",
        "a:colour=red",
        "a:input=0",
        "a:share=1;a:share=2",
        "a:groups=0",
        "a:prefix=-1",
        "a:prefix=99999999",
        "a:groups=99999999",
        "a:priority=9999999999",
        "a:share=nan",
        "a:turns=1001",
        "a:think=nan",
    ],
)
def test_an_invalid_mix_is_refused(mix: str) -> None:
    if mix == "x":  # a class without options of its own
        assert list(request_classes_of(LoadtestConfig(mix=mix))) == ["x"]
        return
    with pytest.raises(ConfigError, match="--mix"):
        request_classes_of(LoadtestConfig(mix=mix))


def test_the_mean_load_of_a_mix_is_weighted_by_share_and_turns() -> None:
    kinds = request_classes_of(LoadtestConfig(mix="a:share=3,turns=2,output=10;b:output=20"))
    assert mean_load(kinds) == (pytest.approx((3 * 2 + 1) / 4), pytest.approx((3 * 2 * 10 + 20) / 4))


def test_equal_keys_have_equal_tokens_and_a_shorter_segment_is_a_prefix() -> None:
    made = prompts()
    piece = segment_key(UNIQUE, 5)
    long = made.tokens((piece, 100))
    assert made.tokens((piece, 37)) == long[:37]
    assert prompts().tokens((piece, 100)) == long
    assert prompts(seed=2).tokens((piece, 100)) != long
    assert made.tokens((segment_key(UNIQUE, 6), 100)) != long
    assert all(10 <= token < 1000 for token in long)


PIECES = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 70), st.booleans()), min_size=1, max_size=8)


@given(st.integers(0, 2**64 - 1), st.sampled_from([(0, 2), (100, 960), (3, 151_000), (0, 2**40)]), PIECES)
def test_tokens_of_a_segment_do_not_depend_on_earlier_segments(
    seed: int, vocab: tuple[int, int], segments: list[tuple[int, int, bool]]
) -> None:
    made = prompts(seed=seed, vocab=vocab)
    for number, length, is_text in segments:
        rng = np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))
        if is_text:
            words = [WORDS[at] for at in rng.integers(0, len(WORDS), length)]
            assert made.text((number, length)).split() == words
        else:
            assert made.tokens((number, length)) == rng.integers(*vocab, length).tolist()


def test_the_prompt_of_a_turn_begins_with_the_whole_previous_turn() -> None:
    (session,) = sessions(1, turns="3", input_len="5", output_len="4", prefix_len=3)
    made = prompts()
    bodies = [json.loads(made.body(planned))["prompt"] for planned in session]
    assert [len(body) for body in bodies] == [8, 17, 26]
    assert bodies[1][:8] == bodies[0] and bodies[2][:17] == bodies[1]
    assert [planned.turns_left for planned in session] == [2, 1, 0]
    assert [planned.think_s for planned in session] == [-1, 0, 0]


def test_each_endpoint_has_its_own_body() -> None:
    planned = PlannedRequest(
        0, 0.0, ((segment_key(UNIQUE, 0), 3),), 7, tenant="t", priority=1, deadline_ms=50.0, priority_class="high"
    )
    body = json.loads(prompts(model="m", with_ids=True).body(planned))
    assert len(body.pop("prompt")) == 3
    assert body == {
        "max_tokens": 7, "temperature": 0, "stream": True, "model": "m", "stream_options": {"include_usage": True},
        "ignore_eos": True, "return_token_ids": True, "user": "t", "priority": 1, "deadline_ms": 50.0,
        "priority_class": "high",
    }  # fmt: skip
    native = json.loads(prompts(endpoint="generate", model="m").body(planned))
    assert (len(native["input_ids"]), native["sampling_params"]["max_new_tokens"], native["model"]) == (3, 7, "m")
    plain = json.loads(prompts(ignores_eos=False, is_stream=False, common={"top_p": 0.5}).body(planned))
    assert "ignore_eos" not in plain and "stream_options" not in plain and plain["top_p"] == 0.5


def test_chat_sends_words_with_earlier_responses_as_the_assistants() -> None:
    planned = PlannedRequest(
        0, 0.0, ((segment_key(UNIQUE, 0), 3), (segment_key(ANSWER, 0), 2), (segment_key(UNIQUE, 1), 4)), 7
    )
    messages = json.loads(prompts(endpoint="chat").body(planned))["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert [len(message["content"].split()) for message in messages] == [3, 2, 4]


@pytest.mark.parametrize("endpoint", ["completions", "generate", "chat"])
def test_a_tokenizer_trims_words_to_the_exact_number_of_tokens(endpoint: str) -> None:
    tokenizer = read_tokenizer(str(SMALL_MODEL))
    made = prompts(endpoint=endpoint, is_text=True, tokenizer=tokenizer)
    for number in range(20):
        body = json.loads(made.body(PlannedRequest(0, 0.0, ((segment_key(UNIQUE, number), 40),), 7)))
        words = body["messages"][0]["content"] if endpoint == "chat" else body.get("prompt") or body["text"]
        assert len(tokenizer.encode(words).ids) == 40


def test_fields_of_a_users_trace_override_all_others() -> None:
    planned = PlannedRequest(0, 0.0, (), 7, extra={"prompt": "Once", "temperature": 0.5})
    body = json.loads(prompts().body(planned))
    assert (body["prompt"], body["temperature"], body["max_tokens"]) == ("Once", 0.5, 7)


@given(st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=5), max_size=12))
def test_the_ideal_cache_holds_the_longest_common_prefix_with_anything_before(
    rows: list[list[tuple[int, int]]],
) -> None:
    plan = [PlannedRequest(number, 0.0, tuple(segments), 1) for number, segments in enumerate(rows)]

    def spelled(planned: PlannedRequest) -> list[tuple[int, int]]:
        return [(piece, position) for piece, length in planned.segments for position in range(length)]

    expected = []
    for number, planned in enumerate(plan):
        own = spelled(planned)
        common = [
            len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(own, spelled(other), strict=False))))
            for other in plan[:number]
        ]
        expected.append(min(max(common, default=0), len(own) - 1))
    # After a shorter segment of the same key the position differs there: only compare other prompts.
    if all(len({piece for piece, _ in row}) == len(row) for row in rows) and _lengths_agree(rows):
        assert ideal_cached_tokens(plan) == expected
    assert all(0 <= cached < planned.num_input for cached, planned in zip(ideal_cached_tokens(plan), plan, strict=True))


def _lengths_agree(rows: list[list[tuple[int, int]]]) -> bool:
    """All segments of a prompt but the last have one length, as in all workloads."""
    lengths: dict[int, int] = {}
    return all(lengths.setdefault(piece, length) == length for row in rows for piece, length in row)


def test_the_default_is_sixty_requests_and_steps_end_with_the_last() -> None:
    assert make_plan(LoadtestConfig()).num_sessions == 60
    assert make_plan(LoadtestConfig(rate="2x3,4x2", arrival="constant")).num_sessions == 14
    assert make_plan(LoadtestConfig(concurrency=3, duration="1s")).num_sessions is None


def test_a_schedule_that_duration_ends_is_as_long_as_the_duration() -> None:
    """Bursts of 20 come every 8 s; a second one, of 40 requests in all, comes after 7.9 s."""
    bursts = {"rate": "2.5", "arrival": "burst", "burst_size": 20, "duration": "7.9s"}
    cut, whole = (make_plan(LoadtestConfig(num_requests=count, **bursts)) for count in (40, 20))  # type: ignore[arg-type]
    assert (cut.num_sessions, cut.seconds) == (20, 7.9)
    assert (whole.num_sessions, whole.seconds) == (20, 0.0)


def test_iterating_a_plan_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"rate": "1000", "num_requests": 30_000, **MIXED}
    plan = make_plan(LoadtestConfig(**options))  # type: ignore[arg-type]
    expected = sessions(30_000, **MIXED)
    monkeypatch.setattr(SessionSampler, "take", lambda *_: pytest.fail("drawn too late"))
    made = list(plan.sessions)
    for session in made:
        assert session[0].at >= 0
    assert [session[0].at for session in made] == sorted(session[0].at for session in made)
    assert made[-1][0].at == plan.seconds == pytest.approx(30, rel=0.05)
    assert list(itertools.islice(plan.sessions, 50)) == made[:50], "the same as often as it is asked for"
    for session in made:
        session[0].at = 0.0
    assert made == expected


def test_a_million_sessions_can_be_planned() -> None:
    plan = make_plan(LoadtestConfig(num_requests=1_000_000, rate="1000", turns="2", input_len="lognormal:500:1"))
    first = next(iter(plan.sessions))
    assert len(first) == 2 and plan.num_sessions == 1_000_000


def test_an_endless_plan_continues_after_the_first_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_sampling, "EARLY_SESSIONS", 40)
    plan = make_plan(LoadtestConfig(concurrency=3, duration="1s", **MIXED))  # type: ignore[arg-type]
    assert list(itertools.islice(plan.sessions, 100)) == sessions(100, **MIXED)
    assert list(itertools.islice(plan.sessions, 100)) == sessions(100, **MIXED), "again"
    monkeypatch.setattr(SessionSampler, "take", lambda *_: pytest.fail("drawn too late"))
    assert len(list(itertools.islice(plan.sessions, 120))) == 120
    with pytest.raises(pytest.fail.Exception, match="too late"):
        list(itertools.islice(plan.sessions, 121))


def test_fewer_sessions_with_many_turns_are_drawn_ahead() -> None:
    (one,) = request_classes_of(LoadtestConfig(turns="1000")).values()
    assert session_sampling.early_sessions([one]) == 2000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"turns": "100", "num_requests": MAX_REQUESTS // 100 + 1}, "lower --turns"),
        ({"duration": "1000000000", "rate": "1000000"}, "--rate and --duration"),
        ({"duration": "1h", "rate": "2800", "arrival": "burst"}, "--rate and --duration"),
    ],
)
def test_a_plan_that_is_too_large_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(LoadtestConfig(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "expected"), [("1", 1), ("200ms", 0.2), ("1.5m", 90), ("5us", 5e-6), (".5s", 0.5)])
def test_durations_have_units(text: str, expected: float) -> None:
    assert parse_seconds(text, "--x") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rate", "1", "--concurrency", "2"], "choose one"),
        (["--duration", "soon"], "--duration must be seconds"),
        (["--find-goodput"], "needs at least one of --slo"),
        (["--time-scale", "2"], "need --trace"),
        (["--trace", "x", "--turns", "2"], "has its own"),
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
        (["--concurrency", "2", "--trace", "t", "--time-scale", "0.1"], "--time-scale needs an open loop"),
        (["--concurrency", "2", "--trace", "t", "--trace-jitter"], "--trace-jitter needs an open loop"),
        (["--prefix-groups", "3"], "--prefix-groups needs --prefix-len"),
        (["--think", "3s"], "--think needs --turns"),
        (["--trace-unit", "ms"], "--trace-unit needs --trace"),
        (["--trace", "x", "--input-len", "9"], "has its own lengths"),
        (["--api-key", "a\nHost: b"], "--api-key has"),
        (["--turns", "1001"], "at most 1,000"),
        (["--num-requests", "10000001"], "--num-requests must be at most"),
        (["--prefix-len", "10000001"], "--prefix-len must be at most"),
        (["--seed", str(2**64)], "--seed must be at most"),
        (["--duration", "9" * 400], "--duration must be at most"),
    ],
)
def test_invalid_options_are_refused_by_name(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(LoadtestConfig, words, command="loadtest")


def test_environment_variables_have_their_own_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_LOADTEST_SEED", "5")
    monkeypatch.setenv("BATON_MODEL", "of another command")
    config = parse(LoadtestConfig, [], command="loadtest")
    assert (config.seed, config.model) == (5, None)
    monkeypatch.setenv("BATON_LOADTEST_SPEED", "5")
    with pytest.raises(ConfigError, match="BATON_LOADTEST_SPEED"):
        parse(LoadtestConfig, [], command="loadtest")
