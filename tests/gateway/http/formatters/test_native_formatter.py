"""Stream events of ``/generate`` with log-probabilities, against the whole answer."""

import json
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
import tokenizers

from common.errors import RequestError
from common.sampling_params import SamplingParams, TokenLogprobs
from common.wire.messages import Tokens
from common.wire.packed_logprobs import pack_logprobs
from gateway.http.formatters.native import NativeFormatter
from gateway.http.protocol.decoding import decode
from gateway.http.protocol.native import NativeRequest
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream
from gateway.text.tokenizer import Tokenizer

PROMPT, NUM_OUTPUT = (10, 11, 12), 6
LOGPROB_FIELDS = ("output_token_logprobs", "output_top_logprobs", "input_token_logprobs", "input_top_logprobs")


class Shown:
    """A tokenizer that counts how often each token is shown."""

    def __init__(self):
        self.counts = Counter()

    def piece(self, token):
        self.counts[token] += 1
        return b"%d" % token


class Detokenizer:
    def push(self, ids):
        return "".join(f"{token} " for token in ids)

    def flush(self):
        return ""


def entry(token):
    """The log-probabilities at a token's position; the alternative is a token that stands nowhere else."""
    return pack_logprobs(TokenLogprobs(-token / 8, ((token + 100, -0.25),)))


def begun():
    sampling = SamplingParams(logprobs=1, prompt_logprobs_from=1)
    request = GenerateRequest("r", "r", PROMPT, sampling, logprob_start=0)
    return OutputStream(request, 0, Detokenizer, lambda stream: None, 0.0)


def token_message(index):
    return Tokens(
        "r", 0, index, (index,), (entry(index),),
        finish="length" if index == NUM_OUTPUT - 1 else "",
        prompt_logprobs=tuple(map(entry, PROMPT[1:])) if index == 0 else (),
    )  # fmt: skip


def formatter(tokenizer, **options):
    body = {"input_ids": list(PROMPT), "return_logprob": True, "return_text_in_logprobs": True, "stream": True}
    decoded = decode(NativeRequest, json.dumps(body).encode())
    return NativeFormatter(SimpleNamespace(tokenizer=tokenizer), decoded, "r", **options)


def streamed(tokenizer, **options):
    """The events of an output that comes token by token, and its whole answer."""
    output, format_ = begun(), formatter(tokenizer, **options)
    events = []
    for index in range(NUM_OUTPUT):
        output.on_tokens(token_message(index), 1.0)
        events.append(json.loads(format_.chunk(output, output.take()).removeprefix(b"data: ")))
    return events, json.loads(b"".join(formatter(Shown(), is_incremental=False).answer([output])))


def test_each_event_shows_all_log_probabilities_so_far_and_each_is_formatted_once():
    tokenizer = Shown()
    events, answer = streamed(tokenizer, is_incremental=False)
    for index, event in enumerate(events):
        meta = event["meta_info"]
        assert (event["text"], event["output_ids"]) == (
            "".join(f"{token} " for token in range(index + 1)), [*range(index + 1)],
        )  # fmt: skip
        assert meta["completion_tokens"] == index + 1
        for name in LOGPROB_FIELDS[:2]:
            assert meta[name] == answer["meta_info"][name][: index + 1]
        for name in LOGPROB_FIELDS[2:]:
            assert meta[name] == answer["meta_info"][name]
        is_last = index == NUM_OUTPUT - 1
        assert meta["finish_reason"] == ({"type": "length", "length": NUM_OUTPUT} if is_last else None)
        assert ("e2e_latency" in meta) == is_last
    assert events[-1] == answer
    assert set(tokenizer.counts.values()) == {1}


@pytest.mark.parametrize("is_incremental", [False, True])
def test_an_event_that_is_formatted_while_the_output_goes_on_shows_its_own_part(is_incremental):
    output, format_ = begun(), formatter(Shown(), is_incremental=is_incremental)
    output.on_tokens(token_message(0), 1.0)
    delta = output.take()
    for index in range(1, NUM_OUTPUT):
        output.on_tokens(token_message(index), 1.0)
    event = json.loads(format_.chunk(output, delta).removeprefix(b"data: "))
    assert (event["text"], event["output_ids"], event["meta_info"]["finish_reason"]) == ("0 ", [0], None)
    assert [token for _, token, _ in event["meta_info"]["output_token_logprobs"]] == [0]


@pytest.mark.parametrize("damaged", [b"\xc1", pack_logprobs(TokenLogprobs(-1.0, ((1 << 40, -2.0),)))])
def test_damaged_log_probabilities_of_the_prompt_are_an_error_that_names_their_node(damaged):
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})))
    output, format_ = begun(), formatter(tokenizer, is_incremental=False)
    output.prefill = "prefill-3"
    output.on_tokens(msgspec.structs.replace(token_message(0), prompt_logprobs=(entry(11), damaged)), 1.0)
    with pytest.raises(
        RequestError, match=r"^node prefill-3 sent log-probabilities of the prompt that cannot be read$"
    ):
        format_.chunk(output, output.take())


def test_incremental_events_show_each_log_probability_once():
    events, answer = streamed(Shown(), is_incremental=True)
    for name in LOGPROB_FIELDS:
        shown = [entry for event in events for entry in event["meta_info"].get(name, [])]
        assert shown == answer["meta_info"][name]
