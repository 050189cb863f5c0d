"""Outputs follow grammars and reasoning budgets, whichever node samples them and however often they are taken over."""

import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.engine_driver import DrivenRequest, Driver
from support.engine.reference_models import make_model
from support.examples import examples
from support.gateway.fake_nodes import make_model_folder
from support.thread_limit import refuse_thread
from tokenizers import Tokenizer

from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig
from common.engine.sampling.constraints import MaskedRow, OutputConstraint, TokenMasks, _biases_on_device
from common.engine.sampling.grammar import GrammarCompiler, load_compiler
from common.engine.sampling.reasoning import Phase, ReasoningState
from common.errors import RequestError
from common.sampling_params import SamplingParams, Thinking
from common.step_plan import Admit, PageDelta, Row, StepPlan

VOCAB_SIZE = 400  # the tokenizer has 325 ids; the others pad the vocabulary
EOS = 322
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LIST = 'start: "[" NUMBER ("," NUMBER){0,5} "]"\nNUMBER: /[1-9][0-9]{0,3}/\n'


def follows_schema(text: str) -> bool:
    found = json.loads(text)
    is_person = isinstance(found["name"], str) and len(found["name"]) <= 12 and 0 <= found["age"] <= 130
    return is_person and len(found["tags"]) <= 3 and set(found["tags"]) <= {"a", "b"} and len(found) == 3


GRAMMARS: dict[str, tuple[str, Callable[[str], object]]] = {
    "schema": (f"start: %json {json.dumps(SCHEMA)}", follows_schema),
    "regex": (r"start: /[a-z]{3,8}@[a-z]{2,5}\.(com|org)/", re.compile(r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)").fullmatch),
    "choice": ('start: "yes" | "no" | "perhaps not"', {"yes", "no", "perhaps not"}.__contains__),
    "rules": (LIST, re.compile(r"\[[1-9]\d{0,3}(,[1-9]\d{0,3}){0,5}\]").fullmatch),
}
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.3, seed=5),
    "truncated": SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=7),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=3, eos_token_id=EOS, vocab_size=VOCAB_SIZE)
    return make_model_folder(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def executor(folder: Path) -> Iterator[TorchExecutor]:
    made = load_executor(
        ModelConfig.load(str(folder)), dtype="float32", num_slots=8, num_pages=400, page_size=16, num_threads=1
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    made = load_compiler(folder, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    yield made
    made.close()


def run_to_end(
    executor: TorchExecutor, params: SamplingParams, *, prompt: range = range(20), most: int = 200
) -> DrivenRequest:
    """Return a request after its end token, or after ``most`` tokens."""
    driver = Driver(executor)
    request = driver.start(0, prompt, params)
    while len(request.output) < most and (not request.output or request.output[-1] != EOS):
        driver.step((request, 0))
    return request


@pytest.mark.slow(sample=0.3)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("kind", GRAMMARS)
def test_outputs_follow_their_grammar_and_end(
    executor: TorchExecutor, tokenizer: Tokenizer, kind: str, sampling: str
) -> None:
    grammar, follows = GRAMMARS[kind]
    for seed in range(8):
        params = SAMPLING[sampling]._replace(grammar=grammar, seed=seed)
        request = run_to_end(executor, params, prompt=range(seed, seed + 20))
        assert request.output[-1] == EOS
        text = tokenizer.decode(request.output)
        assert follows(text), text


def test_rows_with_and_without_grammars_do_not_change_one_another(executor: TorchExecutor) -> None:
    """Eight requests in one batch sample the tokens that each samples alone."""
    params = [SAMPLING["truncated"]._replace(grammar=grammar) for grammar, _ in GRAMMARS.values()]
    params += [SAMPLING["greedy"], SAMPLING["random"], SAMPLING["greedy"]._replace(thinking=Thinking(None, 6, 4))]
    driver = Driver(executor)
    together = [driver.start(slot, range(slot, slot + 20), each) for slot, each in enumerate(params)]
    driver.finish(together, 8)
    for slot, each in enumerate(params):
        driver = Driver(executor)
        alone = driver.start(0, range(slot, slot + 20), each)
        driver.finish([alone], 8)
        assert together[slot].output == alone.output


@pytest.mark.slow(sample=0.3)
@pytest.mark.parametrize("thinking", [None, Thinking(None, 12, 5), Thinking(324, 12, 3)])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_request_that_is_admitted_again_continues_with_the_same_tokens(
    executor: TorchExecutor, kind: str, thinking: Thinking | None
) -> None:
    """As after a transfer, a retraction or a resume, at every position."""
    params = SAMPLING["truncated"]._replace(grammar=GRAMMARS[kind][0], thinking=thinking)
    expected = run_to_end(executor, params).output
    for count in range(len(expected)):
        driver = Driver(executor)
        again = driver.start(1, range(20), params)
        again.output = expected[:count]
        driver.step((again, 0))
        assert again.output == expected[: count + 1]


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(GRAMMARS)))
def test_masks_are_the_same_after_any_history(compiler: GrammarCompiler, data: st.DataObject, kind: str) -> None:
    """One state has consumed its tokens one by one between masks, the other all at once."""
    masks = TokenMasks(compiler.known_ids, vocab_size=VOCAB_SIZE, device=torch.device("cpu"), num_threads=1)
    params = SamplingParams(grammar=GRAMMARS[kind][0])
    compiled = compiler.compile(params.grammar).result()
    grown = OutputConstraint(params, compiled, ())
    output: list[int] = []
    for _ in range(data.draw(st.integers(0, 12))):
        rebuilt = OutputConstraint(params, compiled, output)
        found = masks.begin([MaskedRow(0, grown), MaskedRow(1, rebuilt)]).result()
        assert found.failures == {}
        assert torch.equal(found.biases[0], found.biases[1])
        allowed = torch.nonzero(found.biases[0] == 0)[:, 0].tolist()
        assert allowed
        assert max(allowed) < 325
        output.append(data.draw(st.sampled_from(allowed)))
        grown.append(output[-1])
    masks.close()


def test_what_a_gpu_makes_of_bits_equals_what_the_cpu_makes_of_them() -> None:
    masks = TokenMasks(np.arange(300), vocab_size=300, device=torch.device("cpu"), num_threads=1)
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 10)).astype(np.int32)
    assert torch.equal(_biases_on_device(torch.from_numpy(bits))[:, :300], masks._to_biases(bits))
    masks.close()


def test_masks_are_the_same_although_the_process_may_have_no_further_thread(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("Resource temporarily unavailable (os error 11)")

    params = [SamplingParams(grammar=grammar) for grammar, _ in GRAMMARS.values()]
    rows = [
        MaskedRow(index, OutputConstraint(one, compiler.compile(one.grammar).result(), ()))
        for index, one in enumerate(params)
    ]
    found = []
    for may_have_threads in (True, False):
        masks = TokenMasks(compiler.known_ids, vocab_size=VOCAB_SIZE, device=torch.device("cpu"), num_threads=1)
        if not may_have_threads:
            monkeypatch.setattr("llguidance.LLExecutor", refuse)
            monkeypatch.setattr(threading.Thread, "start", refuse_thread)
        found.append(masks.begin(rows).result().biases.clone())
        masks.close()
    assert torch.equal(*found)


def test_padding_is_never_sampled_even_if_it_is_likely(executor: TorchExecutor) -> None:
    bias = tuple((token, 100.0) for token in range(325, VOCAB_SIZE))
    params = SAMPLING["greedy"]._replace(grammar="start: /(?s:.*)/", logit_bias=bias)
    assert max(run_to_end(executor, params, most=20).output) < 325


def test_logprobs_are_those_of_the_unchanged_distribution(executor: TorchExecutor) -> None:
    params = SAMPLING["greedy"]._replace(logprobs=3)
    driver = Driver(executor)
    free = driver.start(0, range(20), params)
    bound = driver.start(1, range(20), params._replace(grammar=GRAMMARS["choice"][0]))
    driver.step((free, 0), (bound, 0))
    assert free.logprobs[0] is not None and bound.logprobs[0] is not None
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.logprobs[0].token < free.logprobs[0].token


# ---- end tokens ------------------------------------------------------------------------------------------------------


def test_min_tokens_holds_as_long_as_the_grammar_can_go_on(executor: TorchExecutor, tokenizer: Tokenizer) -> None:
    grammar = 'start: "a"{1,6}'
    for min_tokens, expected in ((4, "aaaa"), (30, "aaaaaa")):
        params = SamplingParams(temperature=0.0, grammar=grammar, min_tokens=min_tokens, logit_bias=((EOS, 100.0),))
        assert tokenizer.decode(run_to_end(executor, params).output) == expected


def test_with_ignore_eos_a_finished_grammar_is_followed_by_end_tokens(executor: TorchExecutor) -> None:
    params = SamplingParams(temperature=0.0, grammar='start: "yes"', ignore_eos=True)
    driver = Driver(executor)
    request = driver.start(0, range(20), params)
    driver.finish([request], 8)
    first = request.output.index(EOS)
    assert first > 0
    assert set(request.output[first:]) == {EOS}


def test_a_stop_token_is_sampled_only_where_the_grammar_allows_its_text(
    executor: TorchExecutor, tokenizer: Tokenizer
) -> None:
    stop = tokenizer.token_to_id("b")
    params = SamplingParams(
        temperature=0.0, grammar='start: "aa" /[bc]/', stop_token_ids=(stop,), logit_bias=((stop, 100.0),)
    )
    assert tokenizer.decode(run_to_end(executor, params).output) == "aab"
    assert run_to_end(executor, params._replace(min_tokens=30)).output[-1] == EOS


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_short_regular_expression_with_large_repetitions_is_refused_early(executor: TorchExecutor) -> None:
    driver = Driver(executor)
    request = driver.start(0, range(20), SamplingParams(grammar="start: /((a{500}){500})/"))
    driver.step((request, 0))
    driver.step((request, 0))
    assert "too many expressions" in driver.errors[0]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: "a', "the grammar cannot be followed: 1(10): lexer error"),
        ('start: %json {"type": "nothing"}', "Invalid type: nothing"),
        ("start: <|unknown|>", "unknown special token"),
    ],
)
def test_a_grammar_that_cannot_be_followed_does_not_compile(
    compiler: GrammarCompiler, grammar: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(grammar).result()
    assert words in caught.value.message


def test_a_row_in_which_no_token_satisfies_all_fields_fails_alone(
    executor: TorchExecutor, tokenizer: Tokenizer
) -> None:
    driver = Driver(executor)
    good = driver.start(0, range(20), SAMPLING["greedy"]._replace(grammar=GRAMMARS["choice"][0]))
    never = ((tokenizer.token_to_id("a"), float("-inf")),)
    bad = driver.start(1, range(20), SamplingParams(grammar='start: "a"', logit_bias=never))
    driver.step((good, 0), (bad, 0))
    assert "no token satisfies the grammar" in driver.errors[1]
    assert driver.errors[0] == ""
    assert GRAMMARS["choice"][1](tokenizer.decode(run_to_end(executor, good.params).output))


def test_a_node_without_a_tokenizer_refuses_grammars_and_keeps_budgets(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    executor = load_executor(ModelConfig.load(str(tmp_path)), dtype="float32", num_slots=2, num_pages=9, page_size=16)
    driver = Driver(executor)
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        driver.start(0, range(20), SamplingParams(grammar='start: "a"'))
    budget = driver.start(1, range(20), SamplingParams(temperature=0.0, thinking=Thinking(None, 6, 0)))
    driver.finish([budget], 2)
    assert budget.output[0] == 6
    executor.close()


def test_a_tokenizer_with_a_token_that_the_model_lacks_follows_grammars(folder: Path) -> None:
    """The model of Gemma 3 1B lacks the last token of its tokenizer."""
    made = load_compiler(folder, vocab_size=324, eos_token_ids=(EOS,))
    assert made.known_ids[-1] == 323
    assert not made.compile(GRAMMARS["choice"][0]).result().is_error()
    made.close()


def test_grammars_in_use_and_those_used_last_stay_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.engine.sampling.grammar.MAX_UNUSED", 3)
    texts = [f'start: "{number}"' for number in range(6)]
    works = [compiler.compile(text) for text in texts]
    for text, work in zip(texts[1:], works[1:], strict=True):
        work.result()
        compiler.drop(text)
    in_use = works[0].result()
    assert compiler.compiled(texts[0]) is in_use
    assert [compiler.compile(text) is work for text, work in zip(texts, works, strict=True)] == [
        *(True, False, False),
        *(True, True, True),
    ]


def test_large_grammars_without_a_request_are_forgotten_sooner(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f'start: "{number}"' + " " * 80 for number in range(4)]
    monkeypatch.setattr("common.engine.sampling.grammar.MAX_UNUSED_CHARS", 2 * len(texts[0]))
    for text in texts:
        compiler.compile(text).result()
        compiler.drop(text)
    assert list(compiler._unused)[-2:] == texts[2:]
    assert sum(map(len, compiler._unused)) <= 2 * len(texts[0])


def test_a_dropped_grammar_is_not_compiled_any_more(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two others occupy the threads meanwhile."""
    compile_now, may_go_on = compiler._compile, threading.Event()

    def compile_late(grammar: str) -> Any:
        assert may_go_on.wait(60)
        return compile_now(grammar)

    monkeypatch.setattr(compiler, "_compile", compile_late)
    try:
        for letter in "ab":
            compiler.compile(f'start: "{letter}"')
        work = compiler.compile('start: "never"')
        compiler.drop('start: "never"')
        assert work.cancelled()
    finally:
        may_go_on.set()
    again = compiler.compile('start: "never"')
    assert not again.result().is_error()


@pytest.mark.parametrize("is_compiled_again", [False, True], ids=("forgotten", "compiled again"))
def test_a_step_finds_no_grammar_that_was_forgotten_after_the_step_was_planned(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch, is_compiled_again: bool
) -> None:
    """Its request has ended, so the token of its row is ignored."""
    monkeypatch.setattr("common.engine.sampling.grammar.MAX_UNUSED", 1)
    texts = [f'start: "forgotten {letter}"' for letter in "abc"]
    for text in texts:
        executor.compile_grammar(text).result()
    for text in texts:
        executor.drop_grammar(text)
    if is_compiled_again:
        monkeypatch.setattr(executor._grammars, "_threads", Mock(submit=lambda *_: Future()))
        executor.compile_grammar(texts[0])
    prompt = (5, 6, 7)
    admit = Admit(0, SamplingParams(temperature=0.0, grammar=texts[0]), len(prompt), None, prompt)
    result = executor.run(StepPlan(1, (admit,), (PageDelta(0, 0, (0,)),), (Row(0, 0, prompt, True),)))
    assert (len(result.tokens), result.errors) == (1, ())
    executor.drop_grammar(texts[0])


def test_a_grammar_is_not_forgotten_while_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, may_go_on = GrammarCompiler.refusing("no grammars here"), threading.Event()
    refuse = compiler._compile

    def compile_slowly(grammar: str) -> Any:
        assert grammar != "slow" or may_go_on.wait(60)
        return refuse(grammar)

    monkeypatch.setattr("common.engine.sampling.grammar.MAX_UNUSED", 1)
    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    try:
        slow = compiler.compile("slow")
        while not slow.running():
            time.sleep(0.001)
        compiler.drop("slow")
        for text in ("a", "b", "c"):
            compiler.compile(text).exception()
            compiler.drop(text)
        assert list(compiler._unused) == ["slow"]
        assert compiler.compile("slow") is slow
    finally:
        may_go_on.set()
        compiler.close()


# ---- time ------------------------------------------------------------------------------------------------------------

CONSTRAINTS = "common.engine.sampling.constraints"


def test_an_output_whose_grammar_takes_too_long_ends_alone(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(LIST).result()
    params = SamplingParams(grammar=LIST)
    slow, other = OutputConstraint(params, compiled, ()), OutputConstraint(params, compiled, ())
    masks = TokenMasks(compiler.known_ids, vocab_size=VOCAB_SIZE, device=torch.device("cpu"), num_threads=1)
    expected = masks.begin([MaskedRow(0, slow), MaskedRow(1, other)]).result().biases[1].clone()
    slow.charge(1.0)
    found = masks.begin([MaskedRow(0, slow), MaskedRow(1, other)]).result()
    assert found.failures == {0: "the grammar takes too long to follow; simplify it"}
    assert torch.equal(found.biases[1], expected)
    masks.close()


def test_an_ordinary_output_may_be_of_any_length(compiler: GrammarCompiler) -> None:
    constraint = OutputConstraint(SamplingParams(grammar=LIST), compiler.compile(LIST).result(), ())
    for _ in range(100_000):
        constraint.charge(0.01)
    assert constraint.matcher()


def test_tokens_after_the_one_that_takes_too_long_are_not_consumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{CONSTRAINTS}.ORDINARY_S", -1.0)  # each token takes a second longer than an ordinary one
    matcher = Mock(is_error=Mock(return_value=False))
    constraint = OutputConstraint(SamplingParams(grammar=LIST), Mock(deep_copy=lambda: matcher), [1, 2, 3])
    for _ in range(2):
        with pytest.raises(RequestError, match="takes too long"):
            constraint.matcher()
    matcher.consume_token.assert_called_once_with(1)


@pytest.mark.parametrize("is_slow", [False, True])
def test_masks_are_measured_one_by_one_after_a_step_whose_masks_took_long(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    monkeypatch.setattr(f"{CONSTRAINTS}.ORDINARY_S", 0.0)
    monkeypatch.setattr(f"{CONSTRAINTS}.MAX_EXCESS_S", 0.0)
    monkeypatch.setattr(f"{CONSTRAINTS}.SLOW_MASKS_S", -1.0 if is_slow else float("inf"))
    monkeypatch.setattr(f"{CONSTRAINTS}.NUM_MEASURED_STEPS", 2)
    params, compiled = SamplingParams(grammar=LIST), compiler.compile(LIST).result()
    masks = TokenMasks(compiler.known_ids, vocab_size=VOCAB_SIZE, device=torch.device("cpu"), num_threads=1)

    def num_failures() -> int:
        rows = [MaskedRow(i, OutputConstraint(params, compiled, ())) for i in range(2)]
        return len(masks.begin(rows).result().failures)

    assert [num_failures() for _ in range(3)] == ([0, 2, 2] if is_slow else [0, 0, 0])
    monkeypatch.setattr(f"{CONSTRAINTS}.SLOW_MASKS_S", float("inf"))
    assert [num_failures() for _ in range(3)] == ([2, 2, 2] if is_slow else [0, 0, 0]), "no mask is ordinary"
    monkeypatch.setattr(f"{CONSTRAINTS}.ORDINARY_S", float("inf"))
    assert [num_failures() for _ in range(3)] == [0, 0, 0]
    monkeypatch.setattr(f"{CONSTRAINTS}.ORDINARY_S", 0.0)
    assert num_failures() == 0, "ordinary masks are measured one by one for longer than two steps"
    masks.close()


def test_a_grammar_whose_lexer_has_grown_too_large_fails_no_later_request(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = functools.partial(llguidance.LLParserLimits, max_lexer_states=300)
    monkeypatch.setattr("llguidance.LLParserLimits", limits)
    text = "start: /[a-z ]*e[a-z ]{60}/"
    executor.compile_grammar(text)  # for a request that stays on the node
    for number in range(2):
        driver = Driver(executor)
        params = SamplingParams(temperature=1.0, seed=number, grammar=text)
        request = driver.start(0, range(20), params)
        before = executor._grammars.compiled(text)
        while not driver.errors or not driver.errors[0]:
            driver.step((request, 0))
        assert "too many states" in driver.errors[0]
        assert len(request.output) > 1
        while executor._grammars.compiled(text) is before:
            time.sleep(0.001)
    executor.drop_grammar(text)


def test_a_grammar_may_be_compiled_again_before_it_is_asked_for(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'start: "again"'
    work = compiler.compile(text)
    work.result()
    again: Future[llguidance.LLMatcher] = Future()
    again.set_result(work.result().deep_copy())
    monkeypatch.setattr(compiler._threads, "submit", lambda act, grammar: again)
    compiler.renew(text)
    assert compiler.compiled(text) is again.result()


def test_a_grammar_that_has_failed_and_has_no_request_is_forgotten(compiler: GrammarCompiler) -> None:
    text = 'start: "forgotten"'
    work = compiler.compile(text)
    work.result()
    compiler.drop(text)
    compiler.renew(text)
    assert compiler.compile(text) is not work


# ---- reasoning -------------------------------------------------------------------------------------------------------


def test_reasoning_that_the_prompt_has_begun_ends_with_its_end_token() -> None:
    state = ReasoningState(Thinking(None, 9))
    assert [state.append(token) for token in (1, 8, 9, 8, 9)] == [True] * 3 + [False] * 2
    assert state.phase is Phase.ANSWER


def test_the_first_token_decides_whether_there_is_reasoning() -> None:
    state = ReasoningState(Thinking(7, 9))
    assert state.start_id == 7
    assert not state.append(1)
    assert (state.phase, state.start_id) == (Phase.ANSWER, None)
    state = ReasoningState(Thinking(7, 9))
    assert [state.append(token) for token in (7, 7, 9, 7)] == [True, True, True, False]


def test_white_space_may_precede_the_reasoning() -> None:
    state = ReasoningState(Thinking(7, 9, 2, (3, 4)))
    assert [state.append(token) for token in (3, 4, 3)] == [False] * 3
    assert (state.phase, state.start_id, state.forced) == (Phase.START, 7, None)
    assert [state.append(token) for token in (7, 3, 1)] == [True] * 3
    assert state.forced == 9


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(0, 4))
def test_reasoning_ends_within_its_budget_and_its_end_token(tokens: list[int], budget: int) -> None:
    state = ReasoningState(Thinking(None, 2, budget))
    taken: list[int] = []
    for token in [*tokens, *([3] * 10)]:
        if state.phase is Phase.ANSWER:
            break
        taken.append(token if state.forced is None else state.forced)
        state.append(taken[-1])
    assert state.phase is Phase.ANSWER
    assert taken[-1] == 2
    assert len(taken) <= budget + 1


def test_white_space_before_the_reasoning_is_no_part_of_the_answer(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Otherwise the answer would be what follows the white space in the grammar, which the client does not get."""
    blank, end = tokenizer.token_to_id("Ġ"), tokenizer.token_to_id("t")
    grammar = compiler.compile('start: " a"').result()
    params = SamplingParams(grammar="x", thinking=Thinking(324, end, None, (blank,)))
    constraint = OutputConstraint(params, grammar, (blank,))
    constraint.matcher()
    for token in (324, 5, end):
        constraint.append(token)
    assert constraint.matcher().try_consume_tokens(tokenizer.encode(" a").ids) > 0


@pytest.mark.parametrize("start_id", [None, 324])
def test_the_grammar_begins_after_the_reasoning(
    executor: TorchExecutor, tokenizer: Tokenizer, start_id: int | None
) -> None:
    end = tokenizer.token_to_id("t")
    grammar, follows = GRAMMARS["schema"]
    bias = () if start_id is None else ((start_id, 100.0),)
    params = SAMPLING["random"]._replace(grammar=grammar, thinking=Thinking(start_id, end, 10), logit_bias=bias)
    output = run_to_end(executor, params).output
    begin = output.index(end) + 1
    assert begin <= 12
    assert follows(tokenizer.decode(output[begin:]))


def test_no_end_token_of_the_model_ends_reasoning_that_an_answer_must_follow(
    executor: TorchExecutor, tokenizer: Tokenizer
) -> None:
    end, stop = tokenizer.token_to_id("t"), tokenizer.token_to_id("b")
    bias = ((EOS, 100.0), (end, 50.0))
    params = SamplingParams(temperature=0.0, grammar='start: "yes"', thinking=Thinking(None, end), logit_bias=bias)
    output = run_to_end(executor, params).output
    assert (output[0], output[-1], tokenizer.decode(output[1:])) == (end, EOS, "yes")
    assert run_to_end(executor, params._replace(grammar="")).output == [EOS]
    stopped = params._replace(stop_token_ids=(stop,), logit_bias=(*bias, (stop, 80.0)))
    assert run_to_end(executor, stopped, most=1).output == [stop]
    assert run_to_end(executor, stopped._replace(min_tokens=1), most=1).output == [end]


def test_without_reasoning_the_grammar_begins_at_the_first_token(executor: TorchExecutor, tokenizer: Tokenizer) -> None:
    grammar, follows = GRAMMARS["choice"]
    params = SAMPLING["greedy"]._replace(grammar=grammar, thinking=Thinking(324, 5), logit_bias=((324, -100.0),))
    assert follows(tokenizer.decode(run_to_end(executor, params).output))


def test_rules_that_lead_to_each_other_deeply_end_no_process(compiler: GrammarCompiler) -> None:
    rules = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(15_000)), 'r15000: "x"'])
    matcher = compiler.compile(rules).result().deep_copy()
    assert not matcher.is_error()
    assert compiler.compile(rules).done()


@pytest.mark.slow
def test_the_engine_runs_without_llguidance_and_then_refuses_grammars(folder: Path) -> None:
    script = f"""
import sys
from pathlib import Path
sys.modules["llguidance"] = None  # importing it fails
import common.engine.executor
from common.engine.sampling.grammar import load_compiler
compiler = load_compiler(Path({str(folder)!r}), vocab_size={VOCAB_SIZE}, eos_token_ids=({EOS},))
print(compiler.compile("start: /a/").exception())
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120, env=environ
    )
    assert done.stdout == "llguidance is not installed on the node, and grammars need it\n"


@pytest.mark.slow
def test_no_request_makes_a_loaded_executor_import_a_module(folder: Path) -> None:
    """The process may be able to open no more files by then, and every import opens one."""
    script = f"""
import sys
from support.engine.engine_driver import Driver
from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig
from common.sampling_params import SamplingParams
executor = load_executor(
    ModelConfig.load({str(folder)!r}), dtype="float32", num_slots=8, num_pages=40, page_size=16, num_threads=1
)
executor.warm_up()
sys.addaudithook(lambda event, args: print(args[0]) if event == "import" else None)
driver = Driver(executor)
kinds = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_k=9, top_p=0.9, min_p=0.1, seed=3),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.4),
    SamplingParams(logprobs=2, logit_bias=((5, 1.0),)),
    SamplingParams(grammar='start: "yes" | "no"'),
]
texts = [driver.start(slot, [1, 2, 3], params) for slot, params in enumerate(kinds)]
driver.finish(texts, 3)
executor.close()
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120, env=environ
    )
    assert done.stdout == ""


def test_a_step_finds_the_grammar_of_a_request_that_ended_after_the_step_was_planned(folder: Path) -> None:
    compiler = load_compiler(folder, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    grammar = compiler.compile(LIST).result(60)
    compiler.drop(LIST)
    assert compiler.compiled(LIST) is grammar
    compiler.close()
