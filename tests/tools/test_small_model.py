"""The small model in the repository: an ordinary checkpoint that has learnt to write plays."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config.shared import SMALL_MODEL
from common.engine.models.config import ModelConfig
from gateway.text.tool_parsers.registry import tool_format
from scripts.models import make_small_model as maker

ROOT = Path(__file__).resolve().parents[2]
VERSE = """\
ROMEO:
But, soft! what light through yonder window breaks?
It is the east, and Juliet is the sun.
Arise, fair sun, and kill the envious moon,
Who is already sick and pale with grief.
"""


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(SMALL_MODEL)


def nats_per_token(model, ids: list[int]) -> float:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()


def test_the_weights_are_at_most_four_megabytes_of_bfloat16():
    with safe_open(f"{SMALL_MODEL}/model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert sum(tensor.nbytes for tensor in tensors.values()) < 4_000_000
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors


def test_the_engine_loads_it_as_any_other_checkpoint():
    config = ModelConfig.load(SMALL_MODEL)
    assert (config.vocab_size, config.context_length) == (maker.VOCAB_SIZE, maker.CONTEXT_LENGTH)
    assert set(config.eos_token_ids) == {maker.VOCAB_SIZE - 1, maker.VOCAB_SIZE - 3}


def test_verse_is_more_likely_than_the_same_tokens_shuffled(model, tokenizer):
    ids = tokenizer(VERSE)["input_ids"]
    disorder = torch.tensor(ids)[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].tolist()
    assert nats_per_token(model, ids) < 4.0
    assert nats_per_token(model, disorder) > nats_per_token(model, ids) + 2.5


@pytest.mark.slow
def test_an_answer_in_a_chat_is_a_speech_that_ends_by_itself(model, tokenizer):
    prompt = [{"role": "user", "content": "What is love?"}]
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(0)
    outputs = model.generate(**inputs, max_new_tokens=300, num_return_sequences=8)
    answers = [tokenizer.decode(row[inputs["input_ids"].shape[1] :]) for row in outputs]
    assert sum(bool(re.match(r"[A-Z][A-Za-z ]+:\n\S", answer)) for answer in answers) >= 7
    assert sum("<|im_end|>" in answer for answer in answers) >= 6


def test_the_chat_template_marks_every_turn(tokenizer):
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(turns, tokenize=False) == rendered.removesuffix("<|im_start|>assistant\n")


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOOL_TEXT = """\
You may call these functions:
<tools>
{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
</tools>
Write a call as
<tool_call>
{"name": "FUNCTION", "arguments": {}}
</tool_call><|im_end|>
"""


def test_the_maker_has_the_chat_template_of_the_repository():
    assert (Path(SMALL_MODEL) / "chat_template.jinja").read_text() == maker.CHAT_TEMPLATE


def test_the_chat_template_lists_tools_behind_the_system_message(tokenizer):
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    rendered = tokenizer.apply_chat_template(turns, tools=[TOOL], tokenize=False)
    assert rendered == f"<|im_start|>system\nS\n\n{TOOL_TEXT}<|im_start|>user\nU<|im_end|>\n"
    rendered = tokenizer.apply_chat_template(turns[1:], tools=[TOOL], tokenize=False)
    assert rendered == f"<|im_start|>system\n{TOOL_TEXT}<|im_start|>user\nU<|im_end|>\n"


def test_the_chat_template_writes_calls_and_their_results_as_hermes_does(tokenizer):
    calls = [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}},
        {"type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ]
    turns = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "So:", "tool_calls": calls[1:]},
        {"role": "tool", "content": "fog"},
    ]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\nSo:\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nfog\n</tool_response><|im_end|>\n"
    )


def test_tool_requests_are_recognised_in_the_chat_template():
    found = tool_format("auto", maker.CHAT_TEMPLATE)
    assert found is not None and found.name == "hermes"


@pytest.mark.parametrize("text", ["To be, or not to be", "naïve 日本語 😀\x00", "\r\n\t  two  spaces", "<|im_end|>"])
def test_the_tokenizer_round_trips_every_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_marks_are_single_tokens(tokenizer):
    first = maker.VOCAB_SIZE - len(maker.SPECIALS)
    assert tokenizer("".join(maker.SPECIALS))["input_ids"] == list(range(first, maker.VOCAB_SIZE))


@pytest.mark.slow
def test_training_is_deterministic(tmp_path):
    words = VERSE.split()
    rng = random.Random(0)
    lines = (" ".join(rng.choices(words, k=8)) for _ in range(3000))
    corpus = tmp_path / "play.txt"
    corpus.write_text("\n\n".join(f"{rng.choice(('ROMEO', 'JULIET'))}:\n{line}" for line in lines))
    for out in ("a", "b"):
        command = [sys.executable, "-m", "scripts.models.make_small_model", "--steps-scale", "0.001"]
        subprocess.run([*command, "--corpus", str(corpus), "--out", str(tmp_path / out)], cwd=ROOT, check=True)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert {file.name for file in (tmp_path / "a").iterdir()} == {file.name for file in Path(SMALL_MODEL).iterdir()}


def test_a_play_is_parsed_into_speeches():
    text = "First Citizen:\nSpeak,\nspeak.\n\nAct two\n\nAll:\nResolved.\n"
    assert maker.speeches(text) == [
        maker.Speech("First Citizen", "Speak,\nspeak."),
        maker.Speech("All", "Resolved."),
    ]
