"""Formats of traces, their units, and their replay."""

import json
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.workload.plan import make_plan
from scripts.load_tester.workload.planned_request import HASH, ideal_cached_tokens, segment_key
from scripts.load_tester.workload.prompts import RequestBodies
from scripts.load_tester.workload.traces import ReplayOptions, read_trace, replay_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 0, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2, 9]},
    {"timestamp": 3000, "input_length": 512, "output_length": 9, "hash_ids": [1]},
]


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_mooncakes_milliseconds_are_not_read_as_seconds(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t", *MOONCAKE))
    assert (trace.format, trace.unit, trace.segment_tokens) == ("Mooncake", "ms", 512)
    assert [row.at for row in trace.rows] == [0, 0, 3]
    assert "timestamps in ms (detected)" in trace.notes[0]


def test_a_file_in_mooncakes_format_with_fractions_counts_seconds(tmp_path: Path) -> None:
    rows = [dict(row, timestamp=row["timestamp"] / 1000 + 0.25) for row in MOONCAKE]
    trace = read_trace(write(tmp_path / "t", *rows))
    assert trace.unit == "s"
    assert [row.at for row in trace.rows] == [0, 0, 3]


def test_whole_numbers_too_close_together_for_milliseconds_are_seconds(tmp_path: Path) -> None:
    """One request per second; in milliseconds it would be a thousand."""
    rows = [dict(MOONCAKE[0], timestamp=number) for number in range(10)]
    trace = read_trace(write(tmp_path / "t", *rows))
    assert (trace.unit, trace.rows[-1].at) == ("s", 9)


def test_the_unit_can_be_given(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t", *MOONCAKE), "us")
    assert trace.rows[-1].at == pytest.approx(0.003)
    assert "(given)" in trace.notes[0]


def test_equal_hash_ids_are_equal_prefixes_and_the_last_is_partial(tmp_path: Path) -> None:
    plan = replay_trace(read_trace(write(tmp_path / "t", *MOONCAKE)), ReplayOptions(), np.random.default_rng(0))
    one, two, three = (segment_key(HASH, number) for number in (1, 2, 3))
    assert plan[0].segments == ((one, 512), (two, 512), (three, 76))
    assert plan[1].segments[:2] == plan[0].segments[:2]
    assert [planned.num_input for planned in plan] == [1100, 1030, 512]
    # The second finds two segments, the third its only one, of which one token is always computed.
    assert ideal_cached_tokens(plan) == [0, 1024, 511]


def test_scaled_lengths_keep_what_is_shared(tmp_path: Path) -> None:
    replay = ReplayOptions(length_scale=0.1, max_output=1)
    plan = replay_trace(read_trace(write(tmp_path / "t", *MOONCAKE)), replay, np.random.default_rng(0))
    assert [planned.num_input for planned in plan] == [110, 103, 51]
    assert plan[0].segments[:2] == plan[1].segments[:2] == ((segment_key(HASH, 1), 51), (segment_key(HASH, 2), 51))
    assert [planned.num_output for planned in plan] == [1, 1, 1]


def test_the_last_hash_id_stands_for_the_rest_of_the_prompt(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 3000, "output_length": 5, "hash_ids": [1, 2]}
    plan = replay_trace(read_trace(write(tmp_path / "t", row, row)), ReplayOptions(), np.random.default_rng(0))
    assert plan[0].segments == ((segment_key(HASH, 1), 512), (segment_key(HASH, 2), 2488))
    assert ideal_cached_tokens(plan) == [0, 2999]


def test_a_scale_loses_no_token_of_a_long_prompt(tmp_path: Path) -> None:
    """One of 100 hash ids stands for 1.48 tokens, all for 148."""
    row = {"timestamp": 0, "input_length": 51_200, "output_length": 5, "hash_ids": list(range(100))}
    replay = ReplayOptions(length_scale=0.0029)
    plan = replay_trace(read_trace(write(tmp_path / "t", row, row)), replay, np.random.default_rng(0))
    assert [length for _, length in plan[0].segments[:4]] == [1, 2, 1, 2]  # up to 1.48, 2.97, 4.45 and 5.94
    assert ideal_cached_tokens(plan) == [0, 147]


def test_outputs_have_a_scale_of_their_own(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t", *MOONCAKE))
    both = replay_trace(trace, ReplayOptions(length_scale=0.1), np.random.default_rng(0))
    plan = replay_trace(trace, ReplayOptions(length_scale=0.1, output_scale=1.0), np.random.default_rng(0))
    assert [planned.num_output for planned in plan] == [row.num_output for row in trace.rows]
    assert [planned.num_input for planned in plan] == [planned.num_input for planned in both]
    assert plan[0].num_output > both[0].num_output


def test_time_is_scaled_by_factor_or_to_a_mean_rate(tmp_path: Path) -> None:
    path = write(tmp_path / "t", *MOONCAKE)
    slow = replay_trace(read_trace(path), ReplayOptions(time_scale=2.0), np.random.default_rng(0))
    assert [planned.at for planned in slow] == [0, 0, 6]
    paced = replay_trace(read_trace(path), ReplayOptions(time_scale=None, mean_rate=4.0), np.random.default_rng(0))
    assert [planned.at for planned in paced] == [0, 0, 0.5]


def test_jitter_spreads_requests_over_their_tick(tmp_path: Path) -> None:
    rows = [dict(MOONCAKE[0], timestamp=3000 * (number // 50)) for number in range(200)]
    plan = replay_trace(
        read_trace(write(tmp_path / "t", *rows)), ReplayOptions(has_jitter=True), np.random.default_rng(0)
    )
    at = np.array([planned.at for planned in plan])
    assert len(set(at.tolist())) == 200
    assert at.max() < 12 and np.histogram(at, bins=4, range=(0, 12))[0] == pytest.approx(50, abs=10)


@pytest.mark.parametrize(
    ("gaps_ms", "tick_s"),
    [
        ([43_000, 7_000, 43_000, 12_000, 43_000, 30_000], 1.0),  # a clock of seconds with few requests
        ([3_000, 2_999, 3_001, 6_000, 3_000, 3_002, 3_000, 2_999, 3_000, 3_000], 3.0),  # Mooncake's
    ],
)
def test_the_tick_of_a_clock_is_not_the_most_common_gap(tmp_path: Path, gaps_ms: list[int], tick_s: float) -> None:
    at_ms = np.cumsum([0, *gaps_ms]).tolist()
    trace = read_trace(write(tmp_path / "t", *(dict(MOONCAKE[0], timestamp=at) for at in at_ms)))
    plan = replay_trace(trace, ReplayOptions(has_jitter=True, window=(1e-9, 1e9)), np.random.default_rng(0))
    assert trace.notes[1] == f"requests spread within ticks of {tick_s:g} s"
    moved = [planned.at - at / 1000 for planned, at in zip(plan, at_ms[1:], strict=True)]
    assert min(moved) >= 0 and max(moved) < tick_s and len(set(moved)) == len(moved)


def test_a_closed_loop_is_not_described_by_the_instants_of_the_trace(tmp_path: Path) -> None:
    path = str(write(tmp_path / "t", *(dict(MOONCAKE[0], timestamp=1000 * number) for number in range(6))))
    assert any("replayed over" in note for note in make_plan(LoadtestConfig(trace=path)).notes)
    assert not any("replayed over" in note for note in make_plan(LoadtestConfig(trace=path, concurrency=2)).notes)


def test_a_window_selects_part_of_the_trace(tmp_path: Path) -> None:
    rows = [dict(MOONCAKE[0], timestamp=1000 * number) for number in range(10)]
    plan = replay_trace(
        read_trace(write(tmp_path / "t", *rows)), ReplayOptions(window=(2.0, 5.0)), np.random.default_rng(0)
    )
    assert [planned.at for planned in plan] == [0, 1, 2]


def test_qwen_bailian_is_recognised_by_its_chats_with_seconds_and_segments_of_16(tmp_path: Path) -> None:
    row = {"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 20, "output_length": 3}
    row |= {"type": "text", "turn": 1, "hash_ids": [11, 12]}
    trace = read_trace(write(tmp_path / "t", row, dict(row, timestamp=62.114, type="search")))
    assert (trace.format, trace.unit, trace.segment_tokens) == ("Qwen-Bailian", "s", 16)
    assert [round(row.at or 0, 6) for row in trace.rows] == [0, 1]
    assert [row.class_name for row in trace.rows] == ["text", "search"]
    plan = replay_trace(trace, ReplayOptions(), np.random.default_rng(0))
    assert [length for _, length in plan[0].segments] == [16, 4]


def test_a_note_says_how_much_of_a_trace_a_duration_keeps(tmp_path: Path) -> None:
    """Two seconds of one request per second, from 0 on, have two requests."""
    rows = [{"timestamp": 1000 * at, "input_length": 9, "output_length": 1, "hash_ids": [at]} for at in range(5)]
    trace = read_trace(write(tmp_path / "t", *rows))
    assert len(replay_trace(trace, ReplayOptions(duration_s=2.0), np.random.default_rng(0))) == 2
    assert trace.notes[-1] == "2 of them come within --duration 2 s"
    assert not any("--duration" in note for note in read_trace(write(tmp_path / "t", *rows)).notes)


def test_the_schedule_of_a_trace_that_duration_cuts_is_as_long_as_the_duration(tmp_path: Path) -> None:
    path = write(tmp_path / "t", *[{"prompt": "a", "at": at} for at in (0, 1, 100)])
    assert make_plan(LoadtestConfig(trace=path, duration="8s")).seconds == 8
    assert make_plan(LoadtestConfig(trace=path, duration="8s", num_requests=2)).seconds == 1
    assert make_plan(LoadtestConfig(trace=path, duration="200s")).seconds == 100


def test_hash_ids_may_have_64_bits(tmp_path: Path) -> None:
    row = {"chat_id": 1, "timestamp": 0.5, "input_length": 16, "output_length": 1, "hash_ids": [2**63 + 5]}
    (planned,) = replay_trace(read_trace(write(tmp_path / "t", row)), ReplayOptions(), np.random.default_rng(0))
    assert len(RequestBodies(0, (1, 9), "completions").tokens(planned.segments[0])) == 16


def test_azure_dates_keep_their_seventh_digit(tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10"]
    lines += ["2023-11-16 18:17:04.0319601,3180,8", "2024-05-10 00:00:00.009930+00:00,1,1"]
    trace = read_trace(write(tmp_path / "t", *lines))
    assert (trace.format, trace.unit) == ("Azure", "s")
    assert trace.rows[1].at == pytest.approx(0.0520001, abs=1e-6)
    assert [(row.num_input, row.num_output) for row in trace.rows[:2]] == [(4808, 10), (3180, 8)]


def test_a_column_without_a_name_is_no_class(tmp_path: Path) -> None:
    """As pandas writes the number of each row."""
    lines = [",TIMESTAMP,ContextTokens,GeneratedTokens", "0,2023-11-16 18:17:03,48,10", "1,2023-11-16 18:17:04,31,8"]
    assert [row.class_name for row in read_trace(write(tmp_path / "t", *lines)).rows] == ["", ""]


def test_burstgpts_failed_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "5,ChatGPT,472,18,490,API log"]
    lines += ["45,GPT-4,0,0,0,Conversation log", "118,GPT-4,417,276,693,Conversation log"]
    trace = read_trace(write(tmp_path / "t", *lines))
    assert (trace.format, trace.unit, len(trace.rows)) == ("BurstGPT", "s", 2)
    assert trace.rows[1].at == 113 and trace.rows[1].class_name == "GPT-4"
    assert "1 of 3 rows without tokens left out" in trace.notes[1]


def test_a_users_own_requests_keep_their_fields_and_need_no_clock(tmp_path: Path) -> None:
    lines = [{"prompt": [1, 2, 3], "max_tokens": 4, "priority": 2}, {"messages": [], "output_length": 5, "class": "x"}]
    path = write(tmp_path / "t", *lines)
    plan = make_plan(LoadtestConfig(trace=path, rate="2", arrival="constant"))
    sessions = list(plan.sessions)
    assert [session[0].at for session in sessions] == [0, 0.5]
    assert (sessions[0][0].num_input, sessions[0][0].num_output, sessions[0][0].priority) == (3, 4, 2)
    assert sessions[1][0].class_name == "x" and sessions[1][0].extra == {"messages": []}
    with pytest.raises(ConfigError, match="need a trace with timestamps"):
        make_plan(LoadtestConfig(trace=path, trace_jitter=True))
    with pytest.raises(ConfigError, match="need a trace with timestamps"):
        make_plan(LoadtestConfig(trace=path, trace_unit="ms"))


def test_chats_may_name_their_length_by_max_completion_tokens(tmp_path: Path) -> None:
    for fields, num_output in (
        ({"max_completion_tokens": 500}, 500),
        ({"max_completion_tokens": 500, "max_tokens": 100}, 500),
        ({"max_completion_tokens": None, "max_tokens": 100}, 100),
        ({"max_completion_tokens": None}, 32),
    ):
        (row,) = read_trace(write(tmp_path / "t", {"messages": [], **fields})).rows
        assert row.num_output == num_output and row.extra == {"messages": []}, "the body has one limit"


def test_a_users_own_requests_may_have_hash_ids_of_512_tokens(tmp_path: Path) -> None:
    rows = [{"at": at, "class": "x", "input_length": 600, "output_length": 5, "hash_ids": [1, 2 + at]} for at in (0, 1)]
    trace = read_trace(write(tmp_path / "t", *rows))
    assert (trace.format, trace.unit, trace.rows[1].class_name) == ("own", "s", "x")
    plan = replay_trace(trace, ReplayOptions(), np.random.default_rng(0))
    assert ideal_cached_tokens(plan) == [0, 512]


def test_a_trace_with_timestamps_has_its_own_arrivals(tmp_path: Path) -> None:
    path = write(tmp_path / "t", *MOONCAKE)
    with pytest.raises(ConfigError, match="--arrival has no effect"):
        make_plan(LoadtestConfig(trace=path, arrival="burst"))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["a,b", "1,2"], "no known format"),
        (["{}"], "line 1"),
        ([json.dumps(MOONCAKE[0]), "{not json"], "line 2"),
        ([json.dumps(dict(MOONCAKE[0], input_length="many"))], "line 1"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,1"], "line 2"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], "no request"),
        ([json.dumps({"prompt": "a", "at": 1}), json.dumps({"prompt": "b"})], "some lines have a timestamp"),
        (["Timestamp,Model,Request tokens,Response tokens", "nan,m,4,4"], "not a finite number"),
        (["Timestamp,Model,Request tokens,Response tokens", "1,m,4,inf"], "line 2"),
        (
            ["Timestamp,Model,Request tokens,Response tokens", "1,m,4,1e9"],
            "line 2: 1,000,000,000 tokens",
        ),
        (["ContextTokens,GeneratedTokens,TIMESTAMP", "4,4"], "line 2: Invalid isoformat string: ''"),
        (["Timestamp,Model,Request tokens,Response tokens", '1,"' + "m" * 200_000], "cannot be read"),
        (["Timestamp,Model,Request tokens,Response tokens", "-1e308,m,4,4", "1e308,m,4,4"], "check --trace-unit"),
        ([json.dumps(dict(MOONCAKE[0], output_length=10**30))], "line 1"),
        ([json.dumps({"prompt": "a", "output_length": -1})], "line 1: ValueError a length below 0"),
        ([""], "no known format"),
    ],
)
def test_an_unreadable_trace_is_refused_with_its_line(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(write(tmp_path / "t", *lines))


def test_blank_lines_and_spaces_in_column_names_are_ignored(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / "t", "", "  ", *MOONCAKE)).format == "Mooncake"
    lines = ["", "TIMESTAMP, ContextTokens, GeneratedTokens", "2023-11-16 18:17:03,4808,10"]
    assert read_trace(write(tmp_path / "t", *lines)).rows[0].num_input == 4808


def test_fields_of_a_wrong_type_only_go_to_the_server(tmp_path: Path) -> None:
    """Records and files need a number; the server may refuse the original value."""
    wrong = {"prompt": "a", "priority": "high", "deadline_ms": [], "user": None, "class": None}
    path = write(tmp_path / "t", wrong, {"prompt": "a", "priority": 2**31}, {"prompt": "a", "priority": 3})
    first, second, third = replay_trace(read_trace(path), ReplayOptions(), np.random.default_rng(0))
    assert (first.priority, first.deadline_ms, first.tenant, first.class_name) == (None, None, "", "")
    assert first.extra == {"prompt": "a", "priority": "high", "deadline_ms": [], "user": None}
    assert (second.priority, third.priority) == (None, 3)


def test_objectives_of_a_line_are_limits_of_its_request(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t", {"prompt": "a", "slo_ttft_ms": 200, "slo_itl_ms": 50.0}, {"prompt": "a", "slo_ttft_ms": "x"}
    )
    first, second = replay_trace(read_trace(path), ReplayOptions(), np.random.default_rng(0))
    assert (first.slos, second.slos) == ((("ttft", 0.2), ("itl", 0.05)), ())
    assert first.extra == {"prompt": "a", "slo_ttft_ms": 200, "slo_itl_ms": 50.0}


@pytest.mark.parametrize(
    ("replay", "words"),
    [
        (ReplayOptions(length_scale=1e6), "--length-scale makes"),
        (ReplayOptions(output_scale=1e9), "--output-scale makes"),
        (ReplayOptions(time_scale=1e300), "--time-scale or --rate"),
        (ReplayOptions(window=(7.0, 8.0)), "contains no request"),
    ],
)
def test_a_replay_that_is_too_long_is_refused(tmp_path: Path, replay: ReplayOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replay_trace(read_trace(write(tmp_path / "t", *MOONCAKE)), replay, np.random.default_rng(0))


def test_a_clock_without_ticks_cannot_be_jittered(tmp_path: Path) -> None:
    rows = [dict(MOONCAKE[0], timestamp=number / 10_000) for number in range(9)]
    with pytest.raises(ConfigError, match="no ticks"):
        replay_trace(read_trace(write(tmp_path / "t", *rows)), ReplayOptions(has_jitter=True), np.random.default_rng(0))


def test_requests_without_a_clock_are_all_timed_before_the_start(tmp_path: Path) -> None:
    """Six of ten requests come within three seconds at 2/s."""
    path = write(tmp_path / "t", *[{"prompt": "a"}] * 10)
    plan = make_plan(LoadtestConfig(trace=path, rate="2", arrival="constant", duration="3"))
    assert isinstance(plan.sessions, list) and plan.num_sessions == 6
    assert [session[0].at for session in plan.sessions] == [0, 0.5, 1, 1.5, 2, 2.5]
    slow = make_plan(LoadtestConfig(trace=path, rate="0.00001", arrival="constant", num_requests=2))
    assert slow.seconds == pytest.approx(100_000)
