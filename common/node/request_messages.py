"""Checks the messages that bring requests to a node, and makes requests, and answers about them.

The gateway sends no message that these checks refuse, but a node does not rely on that.
"""

import math
from collections.abc import Container, Iterator, Sequence

import numpy as np

from common.cache.tree_node import TokenKey, pack
from common.decision_log import DecisionLog
from common.errors import ErrorCode, RequestError
from common.finish_reason import Finish
from common.request import Request
from common.sampling_params import MAX_TOP_LOGPROBS, SamplingParams, TokenLogprobs
from common.wire.messages import Decisions, Generate, GetDecisions, Resume, Tokens
from common.wire.packed_logprobs import pack_logprobs


def check_adapter(adapter: str, loaded: Container[str]) -> None:
    """Refuse a request for a LoRA adapter that the node does not have, with a ``RequestError``."""
    if adapter and adapter not in loaded:
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, f"the node does not have the adapter {adapter} any more")


def check_generate(message: Generate, vocab_size: int, adapters: Container[str]) -> TokenKey:
    """Refuse values that would break a step.

    Returns:
        The prompt in packed form.

    Raises:
        RequestError: no prompt, a token id outside of the vocabulary, a parameter out of range, an adapter that is not
            among ``adapters``, or an output that cannot be continued.
    """
    check_adapter(message.adapter, adapters)
    _check_sampling(message.sampling)
    if message.output and message.decode is None:
        raise RequestError(ErrorCode.INVALID_REQUEST, "only a decode node can continue an output")
    if len(message.output) >= message.sampling.max_new_tokens:
        raise RequestError(ErrorCode.INVALID_REQUEST, "output must be shorter than max_new_tokens")
    packed = check_tokens(message.prompt, vocab_size)
    others = (*message.output, *_token_ids(message.sampling))
    if others:
        check_tokens(others, vocab_size)
    return packed


def _check_sampling(sampling: SamplingParams) -> None:
    """Refuse parameters out of range, whatever the model, with a ``RequestError``."""
    numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    problem = ""
    if sampling.max_new_tokens < 1:
        problem = "max_new_tokens must be at least 1"
    elif not 0 <= sampling.seed < 2**64 or not all(0 <= number < math.inf for number in numbers):
        problem = "seed, temperature, top_p, min_p or repetition_penalty is out of range"
    elif sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_TOP_LOGPROBS:
        problem = f"logprobs must be at least 0 and at most {MAX_TOP_LOGPROBS}"
    elif sampling.prompt_logprobs_from is not None and sampling.prompt_logprobs_from < 1:
        problem = "prompt_logprobs_from must be at least 1: no token precedes the first"
    elif not all(sampling.bad_words):
        problem = "a bad word must not be empty"
    if problem:
        raise RequestError(ErrorCode.INVALID_REQUEST, problem)


def _token_ids(sampling: SamplingParams) -> Iterator[int]:
    """The token ids that must be in the vocabulary. Those of bad words need not be."""
    yield from sampling.stop_token_ids
    yield from sampling.allowed_token_ids
    yield from (token for token, _ in sampling.logit_bias)
    if sampling.thinking is not None:
        yield sampling.thinking.end_id
        if sampling.thinking.start_id is not None:
            yield sampling.thinking.start_id


def check_tokens(tokens: Sequence[int], vocab_size: int) -> TokenKey:
    """Refuse an empty prompt and token ids outside of the vocabulary with a ``RequestError``.

    Returns:
        The tokens in packed form; packing is most of the work.
    """
    if not tokens:
        raise RequestError(ErrorCode.INVALID_REQUEST, "a request needs a prompt")
    try:
        packed = pack(tokens)
    except OverflowError:  # a token id is negative, or has more than 32 bits
        packed = b""
    if not packed or int(np.frombuffer(packed, np.uint32).max()) >= vocab_size:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"a token id is outside of the vocabulary of {vocab_size}")
    return packed


#: For tokens that are only computed again: what is sampled after them is discarded, and must not end them. ``lof`` must
#: not put them behind every new prompt.
DISCARDED_SAMPLING = SamplingParams(max_new_tokens=1 << 31, temperature=0.0, ignore_eos=True)


def request_to_decode(message: Generate, now: float) -> Request:
    """The request of a decode node, which arrived at ``now``, with the output of earlier attempts."""
    request = _request(message, message.prompt, message.sampling, now)
    request.expected_output = message.expected_output
    request.slo_ttft_s, request.slo_itl_s = message.slo_ttft_s, message.slo_itl_s
    request.output.extend(message.output)
    request.num_earlier = len(message.output)
    return request


def request_to_prefill(message: Generate | Resume, now: float) -> Request:
    """The request of a prefill node, which arrived at ``now``.

    If tokens are computed again to continue an output elsewhere, prompt and output together are the prompt, except for
    the output's last token: the decode node computes it.
    """
    if isinstance(message, Resume) or message.output:
        prompt = message.prompt if isinstance(message, Resume) else message.prompt + message.output[:-1]
        request = _request(message, prompt, DISCARDED_SAMPLING, now)
        request.expected_output = 1
        request.is_charged = isinstance(message, Resume)  # when its prompt came for the first time
        return request
    request = _request(message, message.prompt, message.sampling, now)
    request.expected_output = message.expected_output
    request.slo_ttft_s = message.slo_ttft_s
    return request


def is_recomputed(request: Request) -> bool:
    """Whether a prefill node only computes tokens again, so that the gateway gets no token and no span from it."""
    return request.sampling is DISCARDED_SAMPLING


def _request(message: Generate | Resume, prompt: tuple[int, ...], sampling: SamplingParams, now: float) -> Request:
    return Request(
        rid=message.rid,
        attempt=message.attempt,
        prompt=prompt,
        sampling=sampling,
        salt=message.cache_salt,
        adapter=message.adapter,
        priority=message.priority,
        priority_class=message.priority_class,
        tenant=message.tenant,
        arrived_at=now - message.waited_s,
        waited_s=message.waited_s,
        deadline_at=now + message.timeout_s,
    )


def first_token_message(request: Request, token: int, logprobs: TokenLogprobs | None, finish: Finish) -> Tokens:
    """The message with the first output token, from the node that computed the prompt."""
    return Tokens(
        *request.key,
        index=0,
        tokens=(token,),
        logprobs=() if logprobs is None else (pack_logprobs(logprobs),),
        finish=finish,
        cached_tokens=request.num_cached,
        prompt_logprobs=tuple(map(pack_logprobs, request.prompt_logprobs)),
    )


def decisions_message(decisions: DecisionLog, message: GetDecisions, now: float) -> Decisions:
    """The answer to ``GetDecisions``."""
    return Decisions(decisions.last(message.limit, now), message.number)
