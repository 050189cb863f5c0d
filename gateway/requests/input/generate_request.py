"""The request for one output, validated and in token ids."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from common.sampling_params import SamplingParams
from gateway.http.protocol.decoding import refuse
from gateway.text.output_parser import OutputFormat, TextParser

#: A node returns all prompt log-probabilities of an output in one message: bytes per token and per alternative, and
#: bytes in all. The gateway keeps those of all outputs of an HTTP request until it has answered.
LOGPROB_TOKEN_BYTES, ALTERNATIVE_BYTES, MAX_LOGPROB_BYTES = 28, 16, 12 << 20
MAX_LOGPROB_BYTES_OF_ALL = 128 << 20
#: Tokens that say how the text of those behind them begins.
NUM_BEFORE = 8


def tenant_rid(given: str, tenant: str) -> str:
    """The ``rid`` for an id that a client has chosen, which clients of other tenants may choose too."""
    if not tenant and ":" not in given:
        return given
    return f"{hashlib.sha256(tenant.encode()).hexdigest()[:32]}:{given}"


def client_rid(rid: str) -> str:
    """A ``rid`` as its client knows it. Only ``tenant_rid`` puts a colon into one."""
    return rid.partition(":")[2] or rid


class GenerateRequest(msgspec.Struct, frozen=True):
    """One output that a client wants.

    Attributes:
        rid: unique among the requests in flight; ``client_rid`` makes the id that clients know of it.
        request_id: id of the HTTP request; the same for all outputs of a batch.
        prompt_number: index of the prompt within the HTTP request; samples of one prompt share it.
        echo: text of the prompt to show before the output, or empty.
        text_before: the last tokens of the prompt; empty if the output is a message of its own, and does not continue
            the prompt's text.
        text_offset: characters of the prompt, where the output's text begins; set if log-probabilities show it.
        logprob_start: index of the first prompt token to list with log-probabilities; that first token has none.
        is_prompt_only: the client wants prompt log-probabilities only. Nodes generate one token; it is not shown.
        stops: stop strings; none is empty.
        output_format: how the output is divided into reasoning, text and tool calls; None if the client wants it whole.
        grammar_param: field of the body that asks for the grammar; empty without one.
        keep_stop: the stop string or token is shown.
        salt: separates prefix caches; requests share cached pages only under the same salt (``cache_root``).
        adapter: id of the LoRA adapter; empty: the model itself.
        priority: higher is more urgent.
        priority_class, tenant: empty for none.
        expected_output: predicted number of output tokens; 0 without a prediction.
        timeout_s: deadline, counted from the request's arrival.
        slo_ttft_s, slo_itl_s: objectives for the first token, and between two tokens; 0 without one.
        key: digest of the client's key, with which any gateway finds the output at the nodes; empty without one.
    """

    rid: str
    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    model: str = ""
    prompt_number: int = 0
    echo: str = ""
    text_before: tuple[int, ...] = ()
    text_offset: int = 0
    logprob_start: int | None = None
    is_prompt_only: bool = False
    stops: tuple[str, ...] = ()
    output_format: OutputFormat | None = None
    grammar_param: str = ""
    keep_stop: bool = False
    skip_special: bool = True
    salt: str = ""
    adapter: str = ""
    priority: int = 0
    priority_class: str = ""
    tenant: str = ""
    expected_output: int = 0
    timeout_s: float = 600.0
    slo_ttft_s: float = 0.0
    slo_itl_s: float = 0.0
    key: str = ""


def in_pieces(request: GenerateRequest, grammar_param: str) -> GenerateRequest:
    """The request with an output that is divided into its parts, even if it can have no other part than text.

    Args:
        grammar_param: the client's name of the field.
    """
    if request.output_format is not None and grammar_param == request.grammar_param:
        return request
    output_format = request.output_format or OutputFormat(TextParser)
    return msgspec.structs.replace(request, output_format=output_format, grammar_param=grammar_param)


def unbound(request: GenerateRequest) -> GenerateRequest:
    """The request without what binds and divides its output, which may take megabytes. Formatters need none of it."""
    sampling = request.sampling._replace(
        logit_bias=(), allowed_token_ids=(), bad_words=(), grammar="", thinking=None, min_tokens=0
    )
    output_format = request.output_format and replace(request.output_format, new_parser=TextParser)
    return msgspec.structs.replace(request, sampling=sampling, stops=(), output_format=output_format)


def prompt_only(request: GenerateRequest) -> GenerateRequest:
    """The request without an output: nothing binds the token that nodes make nevertheless, so it cannot fail."""
    return msgspec.structs.replace(unbound(request), is_prompt_only=True)


def with_prompt_logprobs(request: GenerateRequest, first: int, param: str) -> GenerateRequest:
    """The request with log-probabilities of the prompt tokens after position ``first``.

    Raises RequestError: the prompt is shorter, or the answer would not fit into one message of a node.
    """
    count = len(request.prompt) - first
    if count < 0:
        raise refuse(f"{first} is beyond the end of the prompt, which has {len(request.prompt)} tokens", param)
    num_tops = request.sampling.logprobs or 0
    if _logprob_bytes(count, num_tops) > MAX_LOGPROB_BYTES:
        message = f"log-probabilities of {count} prompt tokens with {num_tops} alternatives each are too many"
        raise refuse(f"{message} for one answer; ask for fewer", param)
    sampling = request.sampling._replace(prompt_logprobs_from=first + 1 if count > 1 else None)
    return msgspec.structs.replace(request, logprob_start=first, sampling=sampling)


def check_prompt_logprobs(requests: Sequence[GenerateRequest], param: str) -> None:
    """Raises RequestError: the gateway would have to keep too many log-probabilities of prompts for one answer."""
    asked = [request for request in requests if request.logprob_start is not None]
    num_bytes = sum(
        _logprob_bytes(len(request.prompt) - (request.logprob_start or 0), request.sampling.logprobs or 0)
        for request in asked
    )
    if num_bytes > MAX_LOGPROB_BYTES_OF_ALL:
        message = f"log-probabilities of the prompts of {len(asked)} outputs are too many for one answer"
        raise refuse(f"{message}; ask for fewer prompts, samples or alternatives", param)


def _logprob_bytes(num_tokens: int, num_tops: int) -> int:
    return num_tokens * (LOGPROB_TOKEN_BYTES + num_tops * ALTERNATIVE_BYTES)
