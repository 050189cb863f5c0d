"""A node refuses requests with values that would break a step, although the gateway never sends them."""

import math
from typing import Any

import pytest

from common.cache.tree_node import pack
from common.errors import ErrorCode, RequestError
from common.node.request_messages import check_generate
from common.sampling_params import MAX_TOP_LOGPROBS, SamplingParams, Thinking
from common.wire.messages import Generate

VOCAB_SIZE = 100
PROMPT = (1, 2, VOCAB_SIZE - 1)


def generate(**fields: Any) -> Generate:
    return Generate("a", 0, PROMPT, SamplingParams(**fields), None, None, 9.0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"seed": -1}, "seed, .* is out of range"),
        ({"temperature": math.nan}, "temperature, .* is out of range"),
        ({"logprobs": -1}, "logprobs must be at least 0 and at most 20"),
        ({"logprobs": MAX_TOP_LOGPROBS + 1}, "logprobs must be at least 0 and at most 20"),
        ({"prompt_logprobs_from": 0}, "prompt_logprobs_from must be at least 1"),
        ({"bad_words": ((5, 6), ())}, "a bad word must not be empty"),
        ({"thinking": Thinking(None, VOCAB_SIZE + 64, 0)}, "outside of the vocabulary of 100"),
        ({"thinking": Thinking(VOCAB_SIZE, 5)}, "outside of the vocabulary of 100"),
        ({"allowed_token_ids": (5, VOCAB_SIZE)}, "outside of the vocabulary of 100"),
        ({"stop_token_ids": (VOCAB_SIZE,)}, "outside of the vocabulary of 100"),
        ({"logit_bias": ((-1, 1.0),)}, "outside of the vocabulary of 100"),
    ],
)
def test_values_that_would_break_a_step_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        check_generate(generate(**fields), VOCAB_SIZE, ())
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_values_at_their_limits_pass() -> None:
    last = VOCAB_SIZE - 1
    message = generate(
        max_new_tokens=1,
        seed=2**64 - 1,
        logprobs=MAX_TOP_LOGPROBS,
        prompt_logprobs_from=1,
        bad_words=((VOCAB_SIZE,),),  # never sampled
        thinking=Thinking(last, last, 0),
        allowed_token_ids=(0, last),
        stop_token_ids=(last,),
        logit_bias=((last, 1.0),),
    )
    assert check_generate(message, VOCAB_SIZE, ()) == pack(PROMPT)
