"""Grammars are compiled in other processes, whatever these take or however they end."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from common.errors import RequestError
from common.system.python_environ import python_environ
from gateway.requests.input import structured_output
from gateway.requests.input.grammars import checker as checker_module
from gateway.requests.input.grammars.checker import GrammarChecker
from gateway.requests.input.grammars.compiler import MAX_MEMORY_BYTES
from gateway.requests.input.structured_output import StructuredOutput

#: Takes time and memory that double with each pattern.
ENDLESS = {
    "type": "string",
    "allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwxyz"],
}
A = StructuredOutput("field", "regex", "a")

DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"items": DEEP}


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    await made.close()


class Compilers:
    """Stands for all processes, so that a test decides when a check ends."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.may_end = asyncio.Event()

    async def check(self, request: bytes, param: str) -> str:
        self.begun.append(request)
        await self.may_end.wait()
        return "start: /a/"


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Compilers:
    made = Compilers()
    monkeypatch.setattr(checker_module._Compiler, "check", lambda _, request, param: made.check(request, param))
    return made


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not look():
            await asyncio.sleep(0.005)


def pids(checker: GrammarChecker) -> list[int]:
    processes = [compiler._process for compiler in checker._compilers]
    return [process.pid for process in processes if process is not None and process.returncode is None]


async def test_large_and_deep_values_are_refused(checker: GrammarChecker) -> None:
    for kind, value, words in (
        ("regex", "a" * 300_000, "300000 bytes"),
        ("regex", "a" * 17_000, "field: has 17000 bytes"),
        ("structural_tag", {"format": {"type": "regex", "pattern": "a" * 17_000}}, "format.pattern: has 17000 bytes"),
        ("json_schema", {"enum": ["x" * 300_000]}, "bytes"),
        ("json_schema", DEEP, "nested more than 64"),
        ("json_schema", "[" * 100_000, "not valid JSON"),
        ("json_schema", json.dumps(DEEP), "nested more than 64"),
    ):
        with pytest.raises(RequestError, match=words):
            await checker.check(StructuredOutput("field", kind, value))  # type: ignore[arg-type]


async def test_a_schema_within_a_text_may_be_as_deep_as_its_decoder_bears(checker: GrammarChecker) -> None:
    """What encodes it again calls itself more often than the decoder, and fails at a few levels less."""
    for depth in range(950, 1_000):
        schema = '{"a": ' * depth + "1" + "}" * depth
        tag = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a>"]}
        with pytest.raises(RequestError, match="field") as caught:
            await checker.check(StructuredOutput("field", "structural_tag", tag))
        assert caught.value.status == 400


async def test_keywords_without_support_are_ignored_only_where_that_is_asked_for(checker: GrammarChecker) -> None:
    schema = {"type": "string", "format": "weird"}
    with pytest.raises(RequestError, match="Unknown format: weird"):
        await checker.check(StructuredOutput("field", "json_schema", schema))
    assert await checker.check(StructuredOutput("field", "json_schema", schema, is_lenient=True))


async def test_results_are_kept_and_errors_too(checker: GrammarChecker) -> None:
    good, bad = StructuredOutput("field", "choice", ["a", "b"]), StructuredOutput("field", "regex", "(")
    text = await checker.check(good)
    with pytest.raises(RequestError, match="unclosed"):
        await checker.check(bad)
    for pid in pids(checker):
        os.kill(pid, signal.SIGSTOP)
    assert await checker.check(good) == text
    with pytest.raises(RequestError, match="unclosed"):
        await checker.check(bad)


async def test_the_event_loop_goes_on_while_a_large_schema_compiles(checker: GrammarChecker) -> None:
    schema = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2_000)}}
    check = asyncio.ensure_future(checker.check(StructuredOutput("field", "json_schema", schema)))
    num_turns = 0
    while not check.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 3
    assert len(await check) > 10_000


async def test_a_grammar_that_takes_too_long_ends_its_process(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "COMPILE_TIMEOUT_S", 0.5)
    endless = StructuredOutput("field", "json_schema", ENDLESS)
    for _ in range(2):
        with pytest.raises(RequestError, match="field: takes more than 10 s to compile") as caught:
            await checker.check(endless)
        assert caught.value.status == 400
    assert await checker.check(A)


async def test_a_grammar_that_takes_too_much_memory_is_refused(checker: GrammarChecker) -> None:
    await checker.check(A)
    (pid,) = pids(checker)
    assert resource.prlimit(pid, resource.RLIMIT_AS) == (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES)
    resource.prlimit(pid, resource.RLIMIT_AS, (700 << 20, 700 << 20))
    with pytest.raises(RequestError, match="field: takes too much memory to compile") as caught:
        await checker.check(StructuredOutput("field", "json_schema", ENDLESS))
    assert caught.value.status == 400


async def test_a_grammar_whose_process_is_killed_can_be_sent_again(checker: GrammarChecker) -> None:
    endless = StructuredOutput("field", "json_schema", ENDLESS)
    for _ in range(2):
        check = asyncio.ensure_future(checker.check(endless))
        await until(lambda: pids(checker) != [])
        os.kill(pids(checker)[0], signal.SIGKILL)
        with pytest.raises(RequestError, match="field: its compiler killed by SIGKILL") as caught:
            await check
        assert caught.value.status == 500


async def test_a_process_that_ended_while_idle_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(A)
    (pid,) = pids(checker)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pids(checker) == [])
    assert await checker.check(StructuredOutput("field", "regex", "b")) == "start: /b/"


async def test_closing_ends_checks_and_processes() -> None:
    checker = GrammarChecker()
    check = asyncio.ensure_future(checker.check(StructuredOutput("field", "json_schema", ENDLESS)))
    await until(lambda: pids(checker) != [])
    (pid,) = pids(checker)
    await checker.close()
    assert not os.path.exists(f"/proc/{pid}")
    with pytest.raises(asyncio.CancelledError):
        await check


def test_a_process_ends_with_its_input() -> None:
    command = [sys.executable, "-m", checker_module._COMPILER, "10"]
    environ = python_environ(os.environ)
    ended = subprocess.run(command, input=b"", capture_output=True, timeout=60, env=environ, check=True)
    assert (ended.stdout, ended.stderr) == (b"", b"")


async def test_a_gateway_that_can_start_no_process_says_so(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RequestError, match="field: no process can be started to compile it: No such file") as caught:
        await checker.check(A)
    assert caught.value.status == 500
    monkeypatch.undo()
    assert await checker.check(A)


async def test_a_grammar_that_has_waited_for_others_gets_429(
    checker: GrammarChecker, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "MAX_WAIT_S", 0.01)
    checks = [asyncio.ensure_future(checker.check(StructuredOutput("field", "regex", letter))) for letter in "abc"]
    with pytest.raises(RequestError, match="field: 3 grammars are being compiled; try again") as caught:
        await checks[2]
    assert (caught.value.code, caught.value.param, caught.value.retry_after_s) == ("queue_full", "field", 1.0)
    compilers.may_end.set()
    assert await asyncio.gather(*checks[:2]) == ["start: /a/"] * 2
    assert await checker.check(StructuredOutput("field", "regex", "c")) == "start: /a/"


async def test_grammars_whose_rules_lead_to_each_other_deeply_end_no_process(checker: GrammarChecker) -> None:
    rules = [f"r{i}: r{i + 1}" for i in range(15_000)]
    lark = "\n".join(["start: r0", *rules, 'r15000: "x"'])
    assert await checker.check(StructuredOutput("field", "lark", lark)) == lark
    references = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5_000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**references, "d5000": {"type": "string"}}}
    assert await checker.check(StructuredOutput("field", "json_schema", schema))


async def test_one_grammar_is_compiled_once_at_a_time(checker: GrammarChecker, compilers: Compilers) -> None:
    compilers.may_end.set()
    assert await asyncio.gather(*(checker.check(A) for _ in range(5))) == ["start: /a/"] * 5
    assert compilers.begun == [A.encoded()]


async def test_a_check_that_its_client_has_left_goes_on_and_is_kept(
    checker: GrammarChecker, compilers: Compilers
) -> None:
    left = asyncio.ensure_future(checker.check(A))
    await until(lambda: compilers.begun != [])
    left.cancel()
    compilers.may_end.set()
    assert await checker.check(A) == "start: /a/"
    assert compilers.begun == [A.encoded()]


async def test_too_many_grammars_at_once_get_429(
    checker: GrammarChecker, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "MAX_PENDING", 2)
    compilers.may_end.set()
    checks = [checker.check(StructuredOutput("field", "regex", letter)) for letter in "abc"]
    found = await asyncio.gather(*checks, return_exceptions=True)
    assert found[:2] == ["start: /a/"] * 2
    assert isinstance(found[2], RequestError)
    assert found[2].code == "queue_full"
    assert await checker.check(StructuredOutput("field", "regex", "c")) == "start: /a/"


async def test_a_tenant_leaves_a_process_and_half_of_the_places_to_others(
    checker: GrammarChecker, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "MAX_PENDING", 8)

    def check(letter: str, tenant: str) -> asyncio.Future[str]:
        return asyncio.ensure_future(checker.check(StructuredOutput("field", "regex", letter), tenant))

    checks = [check(letter, "one") for letter in "abcd"]
    await until(lambda: compilers.begun)
    with pytest.raises(RequestError, match="field: 4 grammars are being compiled; try again"):
        await check("e", "one")
    checks.append(check("x", "two"))
    await until(lambda: len(compilers.begun) > 1)
    assert [json.loads(request)["value"] for request in compilers.begun] == ["a", "x"]
    compilers.may_end.set()
    assert await asyncio.gather(*checks) == ["start: /a/"] * 5
    assert len(compilers.begun) == 5


async def test_a_value_as_large_as_a_body_is_refused_before_it_is_walked_through(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "check_depth", lambda value, param: pytest.fail("on the event loop"))
    large = {"enum": [1] * structured_output.MAX_BYTES}
    with pytest.raises(RequestError, match="field: has 524298 bytes, at most 262144 are allowed"):
        await checker.check(StructuredOutput("field", "json_schema", large))


@pytest.mark.parametrize("depth", [65, 100_000])
async def test_a_value_that_is_nested_too_deeply_is_refused(checker: GrammarChecker, depth: int) -> None:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    with pytest.raises(RequestError, match="field: is nested more than 64 levels deep"):
        await checker.check(StructuredOutput("field", "json_schema", value))
