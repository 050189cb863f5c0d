"""Each invariant is seen to fail: on wrong answers, leaked pages, processes, files, ports, descriptors, long pauses."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.chaos_harness.answers import Answer, Output, Verdict
from scripts.chaos_harness.pauses import Stream
from scripts.chaos_harness.process_resources import ProcessResources, num_descriptors
from scripts.chaos_harness.report import figures, table
from scripts.chaos_harness.verdicts import Findings, Tally, broken_invariants, held, long_pauses
from scripts.chaos_harness.workload import KINDS, distinct_requests

REQUEST = distinct_requests(1, 0, "m")[0]


def answer(*ids: int, **values: Any) -> Answer:
    return Answer({0: Output("x" * len(ids), list(ids), finish="length")}, **{"is_complete": True, **values})


REFERENCE = answer(1, 2, 3)
BAD = {
    Verdict.WRONG: answer(1, 2, 4),
    Verdict.LOST: answer(1, 2, is_complete=False),
    Verdict.HANGING: answer(1, is_complete=False, is_late=True),
    Verdict.FAILED: answer(1, is_complete=False, code="node_lost", stamps=[1.0]),
}


def test_a_run_without_faults_breaks_nothing() -> None:
    tally = Tally()
    assert tally.add(REQUEST, answer(1, 2, 3), REFERENCE) is Verdict.EQUAL
    assert broken_invariants(tally, Findings()) == []


@pytest.mark.parametrize("verdict", BAD, ids=lambda verdict: verdict.name)
def test_one_bad_answer_among_good_ones_breaks_an_invariant(verdict: Verdict) -> None:
    tally = Tally()
    for given in (answer(1, 2, 3), BAD[verdict], answer(1, 2, 3)):
        tally.add(REQUEST, given, REFERENCE)
    [sentence] = broken_invariants(tally, Findings())
    assert sentence.startswith("1 ")
    shown = figures(tally, Findings(), broken=[sentence], injected=["kill"], took_s=1.0)
    assert "repeat with: ./scripts/chaos --seed=7" in "\n".join(table(shown, "./scripts/chaos --seed=7"))


def test_without_exact_arithmetic_other_tokens_are_counted_and_lost_answers_still_break_an_invariant() -> None:
    tally = Tally(is_exact=False)
    assert tally.add(REQUEST, answer(1, 2, 3), REFERENCE) is Verdict.EQUAL
    assert tally.add(REQUEST, answer(1, 7, 3), REFERENCE) is Verdict.ROUNDED
    assert broken_invariants(tally, Findings()) == []
    assert (tally.num_agreeing, tally.num_tokens) == (4, 6)  # all three, and the one before the 7
    shown = figures(tally, Findings(), broken=[], injected=["kill"], took_s=1.0)
    assert "50.0% of answers, 66.7% of tokens" in "\n".join(table(shown, ""))
    assert tally.add(REQUEST, answer(1, 7, is_complete=False), REFERENCE) is Verdict.LOST
    assert len(broken_invariants(tally, Findings())) == 1


def test_a_refused_request_breaks_nothing() -> None:
    tally = Tally()
    tally.add(REQUEST, Answer(status=429, code="queue_full"), REFERENCE)
    assert broken_invariants(tally, Findings()) == []


def test_a_tally_has_accepted_requests_errors_streams_and_the_first_examples() -> None:
    tally = Tally()
    good = answer(1, 2, 3, stamps=[1.0, 2.0], ended_at=2.5)
    for given in (good, Answer(status=429, code="queue_full"), BAD[Verdict.FAILED], *[BAD[Verdict.WRONG]] * 12):
        tally.add(REQUEST, given, REFERENCE)
    assert tally.num_sent == 14
    assert tally.errors == {"queue_full": 1, "node_lost": 1}
    assert tally.streams == [Stream([1.0, 2.0], 2.5)]
    assert len(tally.examples) == 10
    assert tally.examples[0].startswith(f"request 0 ({REQUEST.kind}) ended with an error: node_lost: ")


FOUND = {
    "leaked pages": Findings(pages={"decode-0": "3 missing pages"}),
    "a failed check": Findings(failed_checks={"decode-0 17": 1}),
    "a crash": Findings(crashes=["decode-0 killed by SIGSEGV"]),
    "a leaked file": Findings(left=["decode-0 left files ['/dev/shm/x']"]),
    "leaked descriptors": Findings(descriptors={"gateway": (40, 60)}),
    "a drain that does not end": Findings(problems=["drain: decode-0 had not ended"]),
}


@pytest.mark.parametrize("name", FOUND)
def test_whatever_is_found_breaks_an_invariant(name: str) -> None:
    assert len(broken_invariants(Tally(), FOUND[name])) == 1


def test_a_pause_beyond_its_mark_is_named() -> None:
    found = Findings(pauses={"kill": [0.1] * 50 + [9.0] * 2, "pause": [60.0]}, marks={"kill": 3.0, "hang": 8.0})
    [sentence] = long_pauses(found)
    assert "kill" in sentence
    assert long_pauses(Findings(pauses={"kill": [2.9]}, marks={"kill": 3.0})) == []


def row(**numbers: int) -> dict[str, Any]:
    heartbeat = {
        "num_waiting": 0, "num_running": 0, "num_free_pages": 60, "num_cached_pages": 40, "num_quarantined_pages": 0,
    }  # fmt: skip
    return {"register": {"num_pages": 100}, "heartbeat": heartbeat | numbers, "load_tokens": 0}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, ""),
        ({"num_free_pages": 58}, "2 missing pages"),
        ({"num_quarantined_pages": 1, "num_free_pages": 59}, "1 quarantined pages, 1 missing pages"),
        ({"num_running": 1}, "1 running"),
    ],
)
def test_a_node_that_holds_something_is_seen(numbers: dict[str, int], expected: str) -> None:
    assert held(row(**numbers)) == expected


# ---- real processes --------------------------------------------------------------------------------------------------

LEAKING = """
import mmap, os, socket, sys, time
shared = open(sys.argv[1], "w+b"); shared.truncate(4096); memory = mmap.mmap(shared.fileno(), 4096)
listening = socket.create_server(("127.0.0.1", 0))
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def leaking() -> Iterator[tuple["subprocess.Popen[str]", int, Path]]:
    """A process with a shared file, a listening socket, and a child that inherits both."""
    path = Path(tempfile.mkdtemp(prefix="baton-chaos-test-")) / "shared"
    process = subprocess.Popen([sys.executable, "-c", LEAKING, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process, child, path
    for pid in (process.pid, child):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.stdout.close()
    process.wait()
    path.unlink(missing_ok=True)
    path.parent.rmdir()


def test_a_file_a_port_and_a_process_that_are_left_are_seen(leaking: tuple[Any, int, Path]) -> None:
    process, child, path = leaking
    resources = ProcessResources.of([process.pid, child])
    process.kill()
    process.wait()
    left = resources.left()
    assert f"processes [{child}]" in left
    assert "ports" in left
    assert str(path) in left
    assert len(broken_invariants(Tally(), Findings(left=[left]))) == 1


def test_a_socket_of_another_program_may_have_any_name() -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(b"\0baton-test-%d\xff" % os.getpid())
        assert ProcessResources.of([]).left() == ""


def test_an_open_descriptor_is_counted() -> None:
    before = num_descriptors(os.getpid())
    with socket.socket(), socket.socket():
        assert num_descriptors(os.getpid()) == before + 2


def test_requests_depend_on_the_seed_and_use_every_feature() -> None:
    requests = distinct_requests(24, 5, "m")
    assert requests == distinct_requests(24, 5, "m") != distinct_requests(24, 6, "m")
    assert {request.kind for request in requests} == set(KINDS)
    assert {json.loads(request.body)["stream"] for request in requests} == {True, False}
