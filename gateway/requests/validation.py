"""What a request may ask for: prompts, limits, sampling parameters, samples, judged prompts, stops, messages. Pure.

Every function either completes a piece of a body or raises a ``RequestError`` that names the field at fault.
"""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from common.errors import ErrorCode, RequestError
from common.sampling_params import SamplingParams
from gateway.http.protocol import MAX_STOP_LENGTH, MAX_STOPS, ChatMessage, OpenAI, Sampling, check_no_effect, refuse
from gateway.requests.output_processor import GenerateRequest
from gateway.workers.registry import Limits

GREEDY_BELOW = 1e-5
MAX_PROMPTS = 4096
#: A node answers with the log-probabilities of a prompt in one message: bytes there, of each token and of each
#: alternative beside it, and how many of them all may have.
JUDGED_TOKEN_BYTES, ALTERNATIVE_BYTES, MAX_JUDGED_BYTES = 28, 16, 12 << 20

Prompt = str | Sequence[int]


def check_stream_options(body: OpenAI) -> None:
    if body.stream_options is not None and not body.stream:
        raise refuse("only together with stream: true", "stream_options")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise refuse("continuous_usage_stats needs include_usage", "stream_options")


def spread(given: Any, count: int, is_batch: bool, param: str) -> list[Any]:
    """One value for each prompt."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count or not is_batch:
        raise refuse(f"{len(given)} values for {count} prompts", param)
    return given


def samples(ask: GenerateRequest, count: int, *, prompt_number: int = 0) -> list[GenerateRequest]:
    """``count`` samples of one prompt. Sample i has the seed ``seed + i``, so that each can be had again alone."""
    if count == 1:
        return [dataclasses.replace(ask, prompt_number=prompt_number) if prompt_number else ask]
    return [
        dataclasses.replace(
            ask,
            rid=f"{ask.rid}-{i}",
            prompt_number=prompt_number,
            sampling=dataclasses.replace(ask.sampling, seed=(ask.sampling.seed + i) % 2**64),
        )
        for i in range(count)
    ]


def judged(ask: GenerateRequest, first: int, param: str) -> GenerateRequest:
    """The same with log-probabilities of the prompt's tokens after ``first``, the one before which nothing is judged.

    Raises RequestError: the prompt has no such place, or that would be more than a node can say in one message.
    """
    count = len(ask.prompt) - first
    if count < 0:
        raise refuse(f"{first} is beyond the prompt of {len(ask.prompt)} tokens", param)
    num_tops = ask.sampling.logprobs or 0
    if count * (JUDGED_TOKEN_BYTES + num_tops * ALTERNATIVE_BYTES) > MAX_JUDGED_BYTES:
        message = (
            f"log-probabilities of {count} prompt tokens, each with {num_tops} others, are too many for one answer"
        )
        raise refuse(message, param)
    sampling = dataclasses.replace(ask.sampling, prompt_logprobs_from=first + 1 if count > 1 else None)
    return dataclasses.replace(ask, judged_from=first, sampling=sampling)


def split_prompts(given: Any, param: str = "prompt") -> list[Prompt]:
    """A string, strings, token ids or lists of token ids, as a list of prompts."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise refuse("must not be empty", param)
    kind = type(given[0])
    for i, item in enumerate(given):
        if type(item) is not kind:
            raise refuse("strings, token ids and lists of token ids cannot be mixed", f"{param}[{i}]")
    if kind is int:
        return [given]
    if len(given) > MAX_PROMPTS:
        raise refuse(f"{len(given)} prompts in one request; at most {MAX_PROMPTS}", param)
    return list(given)


def check_count(num_prompts: int, num_samples: int, most: int, param: str) -> None:
    """Raises RequestError for more outputs than there can be at once, before anything is made of them."""
    count = num_prompts * num_samples
    if count > most:
        raise refuse(f"{count} outputs in one request, {most} are possible at once", param)


def check_prompt(prompt: Sequence[int], limits: Limits, param: str) -> None:
    """Raises RequestError for a prompt that no node can take."""
    count = len(prompt)
    if not count:
        raise refuse("must not be empty", param)
    if count >= limits.context_length:
        raise too_long(str(count), limits.context_length, param)
    room = min(limits.prompt_tokens, limits.total_tokens - 1)
    if count > room:
        which = "prefill node" if limits.prompt_tokens == room else "decode node, with one token of output,"
        message = f"the prompt has {count} tokens, the page pool of the largest {which} holds {room}"
        raise refuse(f"{message} (--max-total-tokens there)", param, ErrorCode.POOL_TOO_SMALL)
    smallest, largest = min(prompt), max(prompt)
    if smallest < 0 or largest >= limits.vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise refuse(f"token id {wrong} is not in the vocabulary of {limits.vocab_size}", param)


def too_long(count: str, context_length: int, param: str) -> RequestError:
    message = f"the prompt has {count} tokens, the context is {context_length} with at least one token of output"
    return refuse(message, param, ErrorCode.CONTEXT_LENGTH_EXCEEDED)


def tokens_left(num_prompt: int, limits: Limits) -> int:
    """Output tokens that fit behind a prompt: on any decode node, or if the prompt is too long for that, on one."""
    common = limits.common_tokens if num_prompt < limits.common_tokens else limits.total_tokens
    return min(limits.context_length, common) - num_prompt


def max_tokens(given: int | None, num_prompt: int, limits: Limits, default: int, param: str) -> int:
    """Output tokens at most. Raises RequestError if the client wants more than fit; a default is cut instead."""
    if given is None:
        return min(default, tokens_left(num_prompt, limits))
    if num_prompt + given > limits.context_length:
        message = f"{given} tokens behind a prompt of {num_prompt} exceed the context of {limits.context_length}"
        raise refuse(message, param, ErrorCode.CONTEXT_LENGTH_EXCEEDED)
    if num_prompt + given > limits.total_tokens:
        message = f"{given} tokens behind a prompt of {num_prompt} exceed the page pool of {limits.total_tokens}"
        message += " (--max-total-tokens of the decode nodes)"
        raise refuse(message, param, ErrorCode.POOL_TOO_SMALL)
    return given


def sampling_params(
    body: Sampling, limits: Limits, *, max_new_tokens: int, min_tokens: int, logprobs: int | None, prefix: str = ""
) -> SamplingParams:
    """The client's fields over the model's defaults. Raises RequestError."""
    if min_tokens > max_new_tokens:
        raise refuse(f"{min_tokens} is more than the {max_new_tokens} tokens allowed", f"{prefix}min_tokens")
    stop_ids = body.stop_token_ids or []
    biases = body.logit_bias or {}
    for name, ids in (("stop_token_ids", stop_ids), ("logit_bias", biases)):
        if any(token >= limits.vocab_size for token in ids):
            raise refuse(f"a token id is not in the vocabulary of {limits.vocab_size}", prefix + name)

    def value(name: str, neutral: float) -> float:
        given = getattr(body, name)
        return float(limits.generation.get(name, neutral) if given is None else given)

    temperature = value("temperature", 1.0)
    top_k = max(int(value("top_k", 0)), 0)
    return SamplingParams(
        max_new_tokens=max(max_new_tokens, 1),  # for 0 the nodes make one that nobody sees
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=0 if top_k >= limits.vocab_size else top_k,
        top_p=value("top_p", 1.0),
        min_p=value("min_p", 0.0),
        seed=secrets.randbits(64) if body.seed is None else body.seed & (2**64 - 1),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min_tokens,
        logprobs=logprobs,
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        logit_bias=tuple(biases.items()),
    )


def stop_strings(given: str | list[str] | None, param: str) -> tuple[str, ...]:
    """Raises RequestError for too many, too long or empty ones."""
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > MAX_STOPS:
        raise refuse(f"at most {MAX_STOPS} stop strings", param)
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise refuse(f"a stop string has 1 to {MAX_STOP_LENGTH} characters", param)
    return tuple(stops)


def plain_message(message: ChatMessage, param: str) -> dict[str, Any]:
    """A message as the chat template sees it: parts joined to one text, fields not given left out."""
    check_no_effect(message, f"{param}.")
    if message.tool_call_id is not None:
        raise refuse("tools are not supported yet", f"{param}.tool_call_id", ErrorCode.NOT_SUPPORTED)
    content = message.content
    if isinstance(content, list):
        for i, part in enumerate(content):
            where = f"{param}.content[{i}]"
            if part.type != "text":
                raise refuse("only text is supported", f"{where}.type", ErrorCode.NOT_SUPPORTED)
            if part.text is None:
                raise refuse("is missing", f"{where}.text")
        content = "\n".join(part.text or "" for part in content)
    if content is None:
        raise refuse("must be a text", f"{param}.content")
    role = "system" if message.role == "developer" else message.role  # the newer name for the same
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    return plain
