"""Completes the sampling parameters of a request: the client's fields over the defaults of the model."""

import random
from collections.abc import Callable
from operator import attrgetter

from common.errors import ErrorCode
from common.sampling_params import SamplingParams
from gateway.http.protocol.decoding import refuse
from gateway.http.protocol.fields import MAX_STOP_LENGTH, MAX_STOPS, SamplingFields
from gateway.requests.input.prompts import beyond_context
from gateway.workers.registry import SamplingDefaults, ServingLimits

#: Temperatures below this take the most likely token.
GREEDY_BELOW = 1e-5

#: Reads the fields of ``SamplingDefaults`` of a body.
_sampling_fields: Callable[[SamplingFields], tuple[float | None, ...]] = attrgetter(*SamplingDefaults._fields)


def sampling_params(
    body: SamplingFields,
    limits: ServingLimits,
    *,
    max_new_tokens: int,
    min_tokens: int,
    logprobs: int | None,
    prefix: str = "",
) -> SamplingParams:
    """The client's fields over the model's defaults.

    Args:
        prefix: of the fields' names in errors.
    """
    if min_tokens > max_new_tokens:
        raise refuse(f"{min_tokens} is more than the {max_new_tokens} tokens allowed", f"{prefix}min_tokens")
    if body.stop_token_ids or body.logit_bias or body.allowed_token_ids:
        _check_token_ids(body, limits, prefix)
    given: tuple[float | None, ...] = _sampling_fields(body)
    if given.count(None) == len(given):
        values = limits.defaults
    else:
        values = SamplingDefaults(
            *[default if own is None else own for own, default in zip(given, limits.defaults, strict=True)]
        )
    temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty = values
    return SamplingParams(
        max_new_tokens=max(max_new_tokens, 1),  # 0 still makes one token on the nodes; it is not shown
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=int(top_k) if 0 < top_k < limits.vocab_size else 0,
        top_p=top_p,
        min_p=min_p,
        seed=random.getrandbits(64) if body.seed is None else body.seed & (2**64 - 1),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min_tokens,
        logprobs=logprobs,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=tuple(body.logit_bias.items()) if body.logit_bias else (),
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids)) if body.allowed_token_ids else (),
    )


def _check_token_ids(body: SamplingFields, limits: ServingLimits, prefix: str) -> None:
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        given = getattr(body, name)
        if given and max(given) >= limits.vocab_size:
            raise refuse(f"a token id is not in the vocabulary, which has {limits.vocab_size} ids", prefix + name)


def stop_strings(given: str | list[str] | None, param: str) -> tuple[str, ...]:
    """Refuses too many and too long stop strings. Empty ones ask for nothing."""
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > MAX_STOPS:
        raise refuse(f"has {len(stops)} stop strings, at most {MAX_STOPS} are allowed", param)
    if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise refuse(f"a stop string can have at most {MAX_STOP_LENGTH} characters", param)
    return tuple(stop for stop in stops if stop)


def max_output_tokens(given: int | None, num_prompt: int, limits: ServingLimits, default: int, param: str) -> int:
    """The most output tokens. A default is cut to what fits; a client's value that does not fit is refused."""
    if given is None:
        return min(default, tokens_left(num_prompt, limits))
    if num_prompt + given > limits.context_length:
        message = f"{num_prompt} tokens of the prompt and {given} of the output are {num_prompt + given}"
        raise beyond_context(message, limits.context_length, param)
    if num_prompt + given > limits.total_tokens:
        message = (
            f"{given} output tokens after a prompt of {num_prompt} exceed the page pool of {limits.total_tokens} tokens"
        )
        message += "; ask for fewer, or raise --max-total-tokens of the decode nodes"
        raise refuse(message, param, ErrorCode.POOL_TOO_SMALL)
    return given


def tokens_left(num_prompt: int, limits: ServingLimits) -> int:
    """Output tokens that fit behind a prompt on every decode node, or else on the largest one."""
    common = limits.common_tokens if num_prompt < limits.common_tokens else limits.total_tokens
    return min(limits.context_length, common) - num_prompt
