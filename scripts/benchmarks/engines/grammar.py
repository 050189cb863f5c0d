"""Time that grammars add to a decode step, and the time of masks and of compiling by kind of grammar.

The model has Qwen3-0.6B's shape and random weights, the tokenizer is made up: byte-level, of 151,643 tokens that are
pairs of real ones. Rows with and without grammars take turns step by step in one executor, and medians are compared.
``alone`` is the time of masks for a whole batch, measured without a model beside it; during a step they are found while
the model computes.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from llguidance import LLTokenizer

from common.config.shared import SMALL_MODEL
from common.engine.executor import TorchExecutor
from common.engine.kv_pool import TORCH_DTYPES
from common.engine.models.config import ModelConfig
from common.engine.sampling.constraints import MaskedRow, OutputConstraint, TokenMasks
from common.engine.sampling.grammar import GrammarCompiler, token_ids
from common.sampling_params import SamplingParams
from common.step_plan import Admit, PageDelta, Row, StepPlan
from scripts.benchmarks.engines import engine
from scripts.load_tester.reporting.formats import counted

SHORTEST = ("--layers=1", "--batch=2", "--new-tokens=4", "--rounds=1")
MARK = 1.05
NUM_TOKENS = 151_643  # of Qwen3's tokenizer without its special tokens
PROMPT_LEN = engine.CONTEXT
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "email": {"type": "string", "pattern": "^[a-z]{1,20}@[a-z]{1,20}\\.com$"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string"}}},
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
#: Repeated, so that no output ends within the benchmark.
GRAMMARS = {
    "any JSON object": 'start: one+\none: %json {"type": "object"}\n',
    "JSON schema": f"start: one+\none: %json {json.dumps(PERSON)}\n",
    "JSON of 200 fields": "start: one+\none: %json "
    + json.dumps({"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(200)}}),
    "regex": r"start: /([A-Z][a-z]+ ){1,400}/",
    "choice": 'start: ("positive" | "negative" | "neutral" | "mixed")+\n',
    "EBNF": 'start: expr\nexpr: term (("+" | "-" | "*") term)+\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]+/\n',
    "tagged text": 'start: (head %json {"type": "object"} "</call>")+\nhead[lazy]: /(?s:.*)/ "<call>"\n',
}
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=1 << 20, min_tokens=1 << 20),
    "top-k 20, top-p 0.95": SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=1 << 20, min_tokens=1 << 20
    ),
}
Options = argparse.Namespace  # the fields of `add_options`


@dataclass(frozen=True)
class Vocabulary:
    text: str  # of tokenizer.json
    eos_id: int


def add_options(parser: argparse.ArgumentParser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="(%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(TORCH_DTYPES), help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (one per core)")
    parser.add_argument("--batch", type=int, default=32, help="rows of a step (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="decode steps of a round (%(default)s)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, whose steps are pooled (%(default)s)")


def run(options: Options) -> dict[str, float]:
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    vocabulary = make_vocabulary()
    started_at = time.perf_counter()
    config = replace(engine.model_shape(options.layers), eos_token_ids=(vocabulary.eos_id,))
    tokenizer = LLTokenizer(vocabulary.text, n_vocab=config.vocab_size, eos_token=[vocabulary.eos_id])
    load_s = time.perf_counter() - started_at
    compiler = GrammarCompiler(tokenizer, token_ids(vocabulary.text))
    figures = {"tokenizer, s": load_s}
    layers, threads = counted(options.layers, "layer"), counted(torch.get_num_threads(), "thread")
    print(f"{NUM_TOKENS:,} tokens, {layers}, {options.device}, {threads}")
    print(f"the tokenizer loads in {load_s:.2f} s\n")
    figures |= measure_masks(compiler, config.vocab_size, options)
    executor = make_executor(config, compiler, options)
    figures |= measure_steps(executor, options)
    executor.close()
    return figures


def make_vocabulary() -> Vocabulary:
    """Return a tokenizer of the size of Qwen3's: the small model's tokens, pairs of them, and Chinese words."""
    content = json.loads(Path(SMALL_MODEL, "tokenizer.json").read_text())
    vocab: dict[str, int] = {token: i for i, token in enumerate(content["model"]["vocab"])}
    pieces = list(vocab)
    tails = [piece for piece in pieces if not piece.startswith("\u0120")]  # U+0120 is a space in byte-level BPE
    bytes_of = byte_alphabet()
    draw = random.Random(0)
    while len(vocab) < NUM_TOKENS:
        if draw.random() < 0.2:
            word = "".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(draw.randrange(1, 3)))
            token = "".join(bytes_of[byte] for byte in word.encode())
        else:
            token = draw.choice(pieces) + draw.choice(tails)
        vocab.setdefault(token, len(vocab))
    content["model"] |= {"vocab": vocab, "merges": []}
    for i, token in enumerate(content["added_tokens"]):
        token["id"] = NUM_TOKENS + i
        vocab.pop(token["content"], None)
    return Vocabulary(json.dumps(content), NUM_TOKENS)


def byte_alphabet() -> list[str]:
    """Return the characters with which byte-level tokenizers spell the 256 bytes."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def make_executor(config: ModelConfig, compiler: GrammarCompiler, options: Options) -> TorchExecutor:
    own = {"batch": [2 * options.batch], "prefill": [], "disable_cuda_graph": False}
    shape = argparse.Namespace(**{**vars(options), **own})
    return engine.build(config, shape, compiler)


# ---- masks alone -----------------------------------------------------------------------------------------------------


def measure_masks(compiler: GrammarCompiler, vocab_size: int, options: Options) -> dict[str, float]:
    """Walk through each grammar by random allowed tokens; times per token of one row and of a whole batch."""
    print(f"{'grammar':<20}{'compile':>10}{'mask p50':>10}{'mean':>9}{'p99':>9}{f'batch {options.batch} alone':>16}")
    masks = TokenMasks(
        compiler.known_ids, vocab_size=vocab_size, device=torch.device("cpu"), num_threads=torch.get_num_threads()
    )
    figures: dict[str, float] = {}
    for name, grammar in GRAMMARS.items():
        compile_s = seconds(lambda: compiler.compile(grammar).result())  # noqa: B023
        params = SamplingParams(grammar=grammar, max_new_tokens=1 << 20)
        one = walk(masks, compiler, params, 1, options)
        several = walk(masks, compiler, params, options.batch, options)
        p50, p99 = np.percentile(one, (50, 99))
        print(
            f"{name:<20}{compile_s * 1e3:>7.1f} ms{p50 * 1e6:>7.0f} us{np.mean(one) * 1e6:>6.0f} us"
            f"{p99 * 1e6:>6.0f} us{statistics.median(several) * 1e3:>13.2f} ms",
            flush=True,
        )
        figures |= {
            f"{name}, compile, s": compile_s,
            f"{name}, mask p50, s": float(p50),
            f"{name}, mask mean, s": float(np.mean(one)),
            f"{name}, batch, s": statistics.median(several),
        }
    masks.close()
    return figures


def walk(
    masks: TokenMasks, compiler: GrammarCompiler, params: SamplingParams, num_rows: int, options: Options
) -> list[float]:
    """Return the seconds of each step's masks, for rows that follow different random paths."""
    draw = np.random.default_rng(0)
    compiled = compiler.compile(params.grammar).result()
    constraints = [OutputConstraint(params, compiled, ()) for _ in range(num_rows)]
    rows = [MaskedRow(i, constraint, (NUM_TOKENS,)) for i, constraint in enumerate(constraints)]
    found = []
    for _ in range(options.new_tokens * (options.rounds if num_rows == 1 else 1)):
        started_at = time.perf_counter()
        biases = masks.begin(rows).result().biases
        found.append(time.perf_counter() - started_at)
        for constraint, bias in zip(constraints, biases.numpy(), strict=True):
            constraint.append(int(draw.choice(np.flatnonzero(bias == 0))))
    return found


# ---- steps -----------------------------------------------------------------------------------------------------------


def measure_steps(executor: TorchExecutor, options: Options) -> dict[str, float]:
    """Compare steps of ``batch`` rows without and with grammars, which take turns."""
    print(f"\n{'decode step':<34}{'without':>11}{'with':>11}{'ratio':>8}{'mark':>8}")
    figures: dict[str, float] = {}
    mixed = list(GRAMMARS.values())
    cases = {"mixed": mixed, "JSON schema": [GRAMMARS["JSON schema"]]}
    for sampling_name, sampling in SAMPLING.items():
        for grammar_name, grammars in cases.items():
            without, bound = step_times(executor, sampling, grammars, options)
            name = f"{sampling_name}, {grammar_name}"
            ratio = bound / without
            print(f"{name:<34}{without * 1e3:>8.2f} ms{bound * 1e3:>8.2f} ms{ratio:>8.3f}{MARK:>8.2f}", flush=True)
            figures |= {f"{name}, without, s": without, f"{name}, with, s": bound, f"{name}, ratio": ratio}
    return figures


def step_times(
    executor: TorchExecutor, sampling: SamplingParams, grammars: list[str], options: Options
) -> tuple[float, float]:
    """Return the median seconds of a step without and of one with grammars."""
    batch = options.batch
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(options.rounds):
        several = [grammars[i % len(grammars)] for i in range(batch)]
        for first_slot, given in ((0, [""] * batch), (batch, several)):
            admit(executor, sampling, given, first_slot, seed=number, num_steps=options.new_tokens)
        for step in range(options.new_tokens):
            for first_slot, found in zip((0, batch), times, strict=True):
                rows = tuple(Row(first_slot + i, PROMPT_LEN + step, None, True) for i in range(batch))
                found.append(seconds(lambda: executor.run(StepPlan(0, (), (), rows))))  # noqa: B023
    return statistics.median(times[0]), statistics.median(times[1])


def admit(
    executor: TorchExecutor,
    sampling: SamplingParams,
    grammars: list[str],
    first_slot: int,
    *,
    seed: int,
    num_steps: int,
) -> None:
    """Give a slot to each grammar, from ``first_slot`` on; an empty grammar does not constrain its row."""
    per_row = executor.pool.layout.num_pages(PROMPT_LEN + num_steps)
    history = (1,) * PROMPT_LEN
    admits, pages = [], []
    for slot, grammar in enumerate(grammars, first_slot):
        params = sampling._replace(grammar=grammar, seed=1_000 * seed + slot)
        admits.append(Admit(slot, params, PROMPT_LEN, 1, history if grammar else ()))
        pages.append(PageDelta(slot, 0, tuple(range(slot * per_row, (slot + 1) * per_row))))
        if grammar:
            executor.compile_grammar(grammar).result()
    executor.run(StepPlan(0, tuple(admits), tuple(pages), ()))


def seconds(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at
