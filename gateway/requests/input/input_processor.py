"""Turns a decoded body into requests for the nodes: token ids, complete sampling parameters, all limits checked.

A failed check of a value raises a ``RequestError`` that names the field.
"""

import asyncio
import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import msgspec

from common.config.lora import cache_root
from common.errors import ErrorCode, RequestError
from common.sampling_params import SamplingParams
from gateway.http.limits import MAX_VALUES, check_weights
from gateway.http.protocol.decoding import refuse, value_of_either
from gateway.http.protocol.fields import MAX_STOP_LENGTH, MAX_STOPS, SamplingFields
from gateway.http.protocol.native import NativeRequest, NativeSamplingParams, TokenizeRequest
from gateway.http.protocol.openai import ChatCompletionRequest, CompletionRequest, OpenAIRequest, ToolChoiceField
from gateway.requests.input.chat_output import PLAIN_TEXT, ChatOutput, chat_output, narrow_tools
from gateway.requests.input.generate_request import (
    NUM_BEFORE,
    GenerateRequest,
    check_prompt_logprobs,
    prompt_only,
    tenant_rid,
    with_prompt_logprobs,
)
from gateway.requests.input.grammars.checker import GrammarChecker
from gateway.requests.input.prompts import (
    LONGEST_TOKEN,
    Prompt,
    Truncation,
    beyond_context,
    broadcast,
    check_num_outputs,
    check_vocabulary,
    is_list_of_prompts,
    request_ids,
    split_prompts,
    too_long,
    truncation_of,
)
from gateway.requests.input.structured_output import STRUCTURE_FIELDS, StructuredOutput, structured_output_of
from gateway.text.chat_template import argument_texts, num_parts, render_chat, tools_size
from gateway.text.tokenizer import LONG_CHARACTERS, AsyncTokenizer
from gateway.workers.registry import SamplingDefaults, ServingLimits
from gateway.workers.served_models import ServedModel

COMPLETION_MAX_TOKENS = 16
NATIVE_MAX_TOKENS = 128
GREEDY_BELOW = 1e-5
#: Chats with more messages and parts than this are rendered on the thread; each part takes some microseconds.
MANY_PARTS = 1024
#: Chats with larger tools and arguments than this, in bytes of JSON, are rendered on the thread. It also writes the
#: grammar of larger tools.
LARGE_TOOLS = 64 << 10
#: The longest time for which the function whose parameters do not compile is looked for.
FUNCTION_S = 10.0
#: Requests built before the event loop gets a turn.
REQUESTS_AT_ONCE = 64


class _Context(NamedTuple):
    """The fields that all requests made from one body share."""

    model: ServedModel
    limits: ServingLimits
    tenant: str
    request_id: str
    salt: str
    timeout_s: float
    slo_ttft_s: float = 0.0
    slo_itl_s: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    output: ChatOutput = PLAIN_TEXT
    is_message: bool = False

    @property
    def max_outputs(self) -> int:
        """Outputs that can be in flight at once."""
        return self.limits.max_running + self.model.pool.admission.max_queued


class InputProcessor:
    """Makes requests out of bodies, for all served models."""

    def __init__(
        self,
        tokenizer: AsyncTokenizer,
        *,
        request_timeout_s: float,
        slo_ttft_ms: float | None,
        slo_itl_ms: float | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._request_timeout_s = request_timeout_s
        self._slo_ttft_ms = slo_ttft_ms
        self._slo_itl_ms = slo_itl_ms
        self._grammars = GrammarChecker()

    async def close(self) -> None:
        await self._grammars.close()

    # ---- one method for each kind of body ---------------------------------------------------------------------------

    async def completion(
        self, body: CompletionRequest, model: ServedModel, tenant: str, request_id: str
    ) -> list[GenerateRequest]:
        """One request for each sample of each prompt, prompt after prompt."""
        context = self._openai_context(body, model, tenant, request_id)
        if _is_constrained(body):
            context = await self._constrained(context, body)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise refuse("only supported if it equals n", "best_of", ErrorCode.NOT_SUPPORTED)
        if body.max_tokens == 0 and not body.echo:
            raise refuse("must be at least 1, unless echo is true", "max_tokens")
        prompts = split_prompts(body.prompt, "prompt")
        check_num_outputs(len(prompts), body.n or 1, context.max_outputs, "prompt", "n")
        ids = await self._token_ids(
            context, prompts, "prompt", _truncation(body, COMPLETION_MAX_TOKENS),
            add_special_tokens=body.add_special_tokens is not False,
        )  # fmt: skip
        rids = [request_id] if len(ids) == 1 else [f"{request_id}-{i}" for i in range(len(ids))]
        requests: list[GenerateRequest] = []
        for i, prompt in enumerate(ids):
            request = self._openai_request(context, body, rids[i], prompt, COMPLETION_MAX_TOKENS, body.logprobs)
            if body.echo or body.logprobs is not None:
                request = await self._with_prompt_text(context, request, prompts[i], body)
            requests += _samples(request, body.n or 1, prompt_number=i)
            if _is_turn_due(i):
                await asyncio.sleep(0)
        if any(one.logprob_start is not None for one in requests):
            check_prompt_logprobs(requests, "logprobs")
        return requests

    async def chat(
        self, body: ChatCompletionRequest, model: ServedModel, tenant: str, request_id: str
    ) -> list[GenerateRequest]:
        """One request for each sample; the messages pass through the model's chat template."""
        context = self._openai_context(body, model, tenant, request_id)
        if _is_constrained(body):
            context = await self._constrained(context, body)
        if body.top_logprobs and not body.logprobs:
            raise refuse("needs logprobs to be true", "top_logprobs")
        if body.n is not None and body.n > 1:
            check_num_outputs(1, body.n, context.max_outputs, "messages", "n")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        context = context._replace(is_message=not body.continue_final_message)
        text = await self.render(model, body)
        if _has_parts(body, model):
            make = partial(chat_output, body, model.formats, model.tokenizer, text, context.output)
            output = await self._tokenizer.on_thread(make) if tools_size(body) > LARGE_TOOLS else make()
            if output.grammar != context.output.grammar:
                await self._check_calls(body, output.grammar, tenant)
            context = context._replace(output=output)
        (ids,) = await self._token_ids(
            context, [text], "messages", _truncation(body, None), add_special_tokens=bool(body.add_special_tokens),
        )  # fmt: skip
        return _samples(self._openai_request(context, body, request_id, ids, None, logprobs), body.n or 1)

    async def native(
        self, body: NativeRequest, model: ServedModel, tenant: str, request_id: str
    ) -> list[GenerateRequest]:
        """One request for each sample of each prompt, prompt after prompt."""
        context = self._context(body, model, tenant, request_id)
        if (body.text is None) == (body.input_ids is None):
            raise refuse("give exactly one of text and input_ids", "text")
        param = "text" if body.text is not None else "input_ids"
        given = body.text if body.text is not None else body.input_ids
        assert given is not None
        is_batch = is_list_of_prompts(given)
        prompts = split_prompts(given, param)
        count = len(prompts)
        sampling = NativeSamplingParams() if body.sampling_params is None else body.sampling_params
        params = broadcast(sampling, count, is_batch, "sampling_params")
        starts = broadcast(body.logprob_start_len, count, is_batch, "logprob_start_len")
        num_samples = params[0].n or 1
        if any((other.n or 1) != num_samples for other in params):
            raise refuse("must be the same for all prompts", "sampling_params.n")
        check_num_outputs(count, num_samples, context.max_outputs, param, "sampling_params.n")
        rids = request_ids(body.rid, request_id, count, is_batch)
        ids = await self._token_ids(context, prompts, param)
        requests: list[GenerateRequest] = []
        for i in range(count):
            prefix = f"sampling_params[{i}]." if isinstance(body.sampling_params, list) else "sampling_params."
            if body.rid:
                context = context._replace(request_id=body.rid if isinstance(body.rid, str) else rids[i])
            if i == 0 or params[i] is not params[i - 1]:
                context = await self._with_bad_words(context, params[i].bad_words, f"{prefix}bad_words")
                context = await self._with_structure(context, params[i], prefix)
            rid = tenant_rid(rids[i], tenant) if body.rid else rids[i]
            request = self._native_request(context, body, params[i], rid, ids[i], prefix)
            start = starts[i]
            if start is not None and start >= 0:
                if not body.return_logprob:
                    raise refuse("needs return_logprob to be true", "logprob_start_len")
                request = with_prompt_logprobs(request, start, "logprob_start_len")
            requests += _samples(request, num_samples, prompt_number=i)
            if _is_turn_due(i):
                await asyncio.sleep(0)
        if any(one.logprob_start is not None for one in requests):
            check_prompt_logprobs(requests, "logprob_start_len")
        return requests

    def _context(
        self, body: OpenAIRequest | NativeRequest, model: ServedModel, tenant: str, request_id: str
    ) -> _Context:
        limits = model.pool.registry.accepted
        if limits is None:
            raise model.pool.no_route()
        timeout_s = self._request_timeout_s if body.deadline_ms is None else body.deadline_ms / 1000
        context = _Context(
            model, limits, tenant, request_id, cache_root(model.adapter, body.cache_salt or ""), timeout_s
        )
        slo_ttft_ms, slo_itl_ms = body.slo_ttft_ms or self._slo_ttft_ms, body.slo_itl_ms or self._slo_itl_ms
        if slo_ttft_ms is None and slo_itl_ms is None:
            return context
        return context._replace(slo_ttft_s=(slo_ttft_ms or 0.0) / 1000, slo_itl_s=(slo_itl_ms or 0.0) / 1000)

    def _openai_context(self, body: OpenAIRequest, model: ServedModel, tenant: str, request_id: str) -> _Context:
        """Check what both OpenAI endpoints share."""
        context = self._context(body, model, tenant, request_id)
        if body.stream_options is not None:
            _check_stream_options(body)
        if body.max_completion_tokens is not None:
            body.max_tokens = value_of_either(body, "max_tokens", "max_completion_tokens")
        return context

    async def _constrained(self, context: _Context, body: OpenAIRequest) -> _Context:
        """The context with the bad words and the structure that a body asks for."""
        if body.bad_words:
            context = await self._with_bad_words(context, body.bad_words, "bad_words")
        return await self._with_structure(context, body)

    async def _with_bad_words(self, context: _Context, words: Sequence[str] | None, param: str) -> _Context:
        """The context with the tokens of each word, as it begins a text and as it follows a space."""
        if not words:
            return context._replace(bad_words=())
        if not all(word.strip() for word in words):
            raise refuse("a bad word must not be empty", param)
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                ids = await self._tokenizer.tokenize(
                    context.model.tokenizer, text, add_special_tokens=False, param=param
                )
                if not ids:  # the tokenizer drops every character of the word
                    raise refuse("a bad word must not be empty", param)
                sequences[tuple(ids)] = None
        return context._replace(bad_words=tuple(sequences))

    async def _with_structure(
        self, context: _Context, body: OpenAIRequest | NativeSamplingParams, prefix: str = ""
    ) -> _Context:
        """The context with the grammar of the structured output that the fields ask for."""
        if not _asks_for_structure(body):
            return context._replace(output=PLAIN_TEXT) if context.output.grammar else context
        wanted = structured_output_of(body, prefix)
        if wanted is None:
            return context
        grammar = await self._grammars.check(wanted, context.tenant)
        return context._replace(output=ChatOutput(grammar=grammar, param=wanted.param))

    async def _check_calls(self, body: ChatCompletionRequest, grammar: str, tenant: str) -> None:
        """Check the grammar of calls. An error names the function whose parameters alone have the same error."""
        try:
            await self._grammars.check(StructuredOutput("tools", "lark", grammar), tenant)
        except RequestError as error:
            if error.code is not ErrorCode.INVALID_REQUEST:  # too many are being compiled
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FUNCTION_S):
                    await self._check_functions(body, error, tenant)
            raise

    async def _check_functions(self, body: ChatCompletionRequest, error: RequestError, tenant: str) -> None:
        for function in [tool.function for tool in body.tools or []]:
            wanted = StructuredOutput(
                "schema", "json_schema", function.parameters or {}, is_lenient=not function.strict
            )
            try:
                await self._grammars.check(wanted, tenant)
            except RequestError as own:
                if own.message.partition(": ")[2] == error.message.partition(": ")[2]:
                    raise refuse(f"in {function.name}, {own.message}", "tools") from error

    # ---- chats as text ----------------------------------------------------------------------------------------------

    async def render(self, model: ServedModel, body: ChatCompletionRequest | TokenizeRequest) -> str:
        """A chat through the model's chat template; a large one on the thread. Raises RequestError."""
        template = model.chat_template
        if template is None:
            raise refuse("the model has no chat template; use /v1/completions", "messages", ErrorCode.NOT_SUPPORTED)
        if isinstance(body, ChatCompletionRequest) and isinstance(body.tool_choice, ToolChoiceField):
            narrow_tools(body, body.tool_choice)
        texts = argument_texts(body)
        if texts:
            await check_weights(texts, MAX_VALUES)
        if num_parts(body) > MANY_PARTS or tools_size(body) + sum(map(len, texts)) > LARGE_TOOLS:
            return await self._tokenizer.on_thread(lambda: render_chat(template, body))
        return render_chat(template, body)

    async def count_tokens(self, model: ServedModel, body: ChatCompletionRequest) -> int:
        """Tokens of the prompt that a chat becomes. Raises RequestError."""
        text = await self.render(model, body)
        return len(await self._tokenizer.tokenize(model.tokenizer, text, add_special_tokens=False, param="messages"))

    # ---- token ids --------------------------------------------------------------------------------------------------

    async def _token_ids(
        self,
        context: _Context,
        prompts: Sequence[Prompt],
        param: str,
        truncation: Truncation | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[Sequence[int]]:
        """Token ids of prompts that nodes can take. Raises RequestError for others."""
        tokenizer, limits = context.model.tokenizer, context.limits
        ids: list[Sequence[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                if not prompt:
                    raise refuse("must not be empty", param)
                if truncation is not None:
                    prompt = truncation.of_text(prompt, limits)
                elif len(prompt) > LONG_CHARACTERS and len(prompt) > LONGEST_TOKEN * limits.context_length:
                    await self._check_beginning(context, prompt, param)
                prompt = await self._tokenizer.tokenize(
                    tokenizer, prompt, add_special_tokens=add_special_tokens, param=param
                )
                if tokenizer.vocab_size > limits.vocab_size:
                    check_vocabulary(prompt, limits.vocab_size, param)
            else:
                check_vocabulary(prompt, limits.vocab_size, param)
            if truncation is not None:
                prompt = truncation.of_ids(prompt, limits)
            check_length(prompt, limits, param)
            ids.append(prompt)
        return ids

    async def _check_beginning(self, context: _Context, text: str, param: str) -> None:
        """Refuse a text that is far too long after tokenizing only its beginning."""
        length = context.limits.context_length
        beginning = text[: 8 * length]
        tokenizer = context.model.tokenizer
        count = len(await self._tokenizer.tokenize(tokenizer, beginning, add_special_tokens=False, param=param))
        if count > length + length // 2:  # a margin for the word that the cut has split
            raise too_long(f"more than {length}", length, param)

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def _with_prompt_text(
        self, context: _Context, request: GenerateRequest, prompt: Prompt, body: CompletionRequest
    ) -> GenerateRequest:
        """The request with its prompt shown, if ``echo`` asks for it, and with the position of the output behind it."""
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            text = prompt
        else:
            tokenizer = context.model.tokenizer
            text = (await self._tokenizer.detokenize(tokenizer, [request.prompt], request.skip_special))[0]
        request = msgspec.structs.replace(request, text_offset=len(text))
        if not body.echo:
            return request
        request = msgspec.structs.replace(request, echo=text)
        if body.max_tokens == 0:
            request = prompt_only(request)
        return request if request.sampling.logprobs is None else with_prompt_logprobs(request, 0, "logprobs")

    def _openai_request(
        self, context: _Context, body: OpenAIRequest, rid: str, prompt: Sequence[int], default_max: int | None,
        logprobs: int | None,
    ) -> GenerateRequest:  # fmt: skip
        limits = context.limits
        default = _tokens_left(len(prompt), limits) if default_max is None else default_max
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        maximum = max_output_tokens(body.max_tokens, len(prompt), limits, default, param)
        sampling = _sampling_params(body, limits, max_new_tokens=maximum, minimum="min_tokens", logprobs=logprobs)
        return self._request(context, rid, prompt, sampling, body)

    def _native_request(
        self,
        context: _Context,
        body: NativeRequest,
        params: NativeSamplingParams,
        rid: str,
        prompt: Sequence[int],
        prefix: str,
    ) -> GenerateRequest:
        maximum_name = "max_tokens" if params.max_new_tokens is None else "max_new_tokens"
        given = params.max_new_tokens
        if params.max_tokens is not None:
            given = value_of_either(params, "max_new_tokens", "max_tokens", prefix)
        maximum = max_output_tokens(given, len(prompt), context.limits, NATIVE_MAX_TOKENS, prefix + maximum_name)
        minimum_name = "min_tokens" if params.min_new_tokens is None else "min_new_tokens"
        if params.min_tokens is not None:
            value_of_either(params, "min_new_tokens", "min_tokens", prefix)
        if params.sampling_seed is not None:
            params.seed = value_of_either(params, "seed", "sampling_seed", prefix)
        logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
        sampling = _sampling_params(
            params, context.limits, max_new_tokens=maximum, minimum=minimum_name, logprobs=logprobs, prefix=prefix
        )
        request = self._request(context, rid, prompt, sampling, params, prefix)
        return prompt_only(request) if given == 0 else request

    @staticmethod
    def _request(
        context: _Context, rid: str, prompt: Sequence[int], sampling: SamplingParams, options: SamplingFields,
        prefix: str = "",
    ) -> GenerateRequest:  # fmt: skip
        prompt, keep_stop = tuple(prompt), options.include_stop_str_in_output
        if options.no_stop_trim is not None:
            keep_stop = value_of_either(options, "include_stop_str_in_output", "no_stop_trim", prefix)
        if context.bad_words or context.output is not PLAIN_TEXT:
            sampling = _bound(sampling, context)
        return GenerateRequest(
            rid=rid,
            request_id=context.request_id,
            prompt=prompt,
            sampling=sampling,
            model=context.model.name,
            keep_stop=bool(keep_stop),
            stops=_stop_strings(options.stop, f"{prefix}stop") if options.stop else (),
            output_format=context.output.output_format,
            grammar_param=context.output.param,
            text_before=() if context.is_message else prompt[-NUM_BEFORE:],
            skip_special=options.skip_special_tokens is not False,
            salt=context.salt,
            adapter=context.model.adapter,
            tenant=context.tenant,
            expected_output=_expected_output(context, prompt, sampling),
            timeout_s=context.timeout_s,
            slo_ttft_s=context.slo_ttft_s,
            slo_itl_s=context.slo_itl_s,
        )


def _is_turn_due(number: int) -> bool:
    """Whether the event loop gets a turn now, after the request with this number."""
    return number % REQUESTS_AT_ONCE == REQUESTS_AT_ONCE - 1


def _is_constrained(body: OpenAIRequest) -> bool:
    """Whether a body asks for bad words or for structured output."""
    return bool(body.bad_words) or _asks_for_structure(body)


def _asks_for_structure(body: msgspec.Struct) -> bool:
    given = _structure_fields(type(body))(body)
    return given.count(None) < len(given)


@functools.cache
def _structure_fields(kind: type[msgspec.Struct]) -> Callable[[msgspec.Struct], tuple[object, ...]]:
    """Read the fields of a body that ask for structured output."""
    return attrgetter(*[name for name in STRUCTURE_FIELDS if name in kind.__struct_fields__])


#: Reads the fields of ``SamplingDefaults`` of a body.
_sampling_fields: Callable[[SamplingFields], tuple[float | None, ...]] = attrgetter(*SamplingDefaults._fields)


# ---- checks: each completes a part of a request, or raises a RequestError that names the field ----------------------


def check_length(prompt: Sequence[int], limits: ServingLimits, param: str) -> None:
    """Refuse a prompt that no node can take."""
    count = len(prompt)
    if not count:
        raise refuse("must not be empty", param)
    if count >= limits.context_length:
        raise too_long(str(count), limits.context_length, param)
    room = min(limits.prompt_tokens, limits.total_tokens - 1)
    if count > room:
        which = "prefill node" if limits.prompt_tokens == room else "decode node, with one token of output,"
        message = f"the prompt has {count} tokens, but the page pool of the largest {which} holds {room}"
        raise refuse(f"{message}; shorten it, or raise --max-total-tokens of the node", param, ErrorCode.POOL_TOO_SMALL)


def max_output_tokens(given: int | None, num_prompt: int, limits: ServingLimits, default: int, param: str) -> int:
    """The most output tokens. A default is cut to what fits; a client's value that does not fit is refused."""
    if given is None:
        return min(default, _tokens_left(num_prompt, limits))
    if num_prompt + given > limits.context_length:
        message = f"a prompt of {num_prompt} and an output of {given} tokens are more"
        raise beyond_context(f"{message}; ask for fewer, or shorten the prompt", limits.context_length, param)
    if num_prompt + given > limits.total_tokens:
        message = (
            f"{given} output tokens after a prompt of {num_prompt} exceed the page pool of {limits.total_tokens} tokens"
        )
        message += "; ask for fewer, or raise --max-total-tokens of the decode nodes"
        raise refuse(message, param, ErrorCode.POOL_TOO_SMALL)
    return given


def _tokens_left(num_prompt: int, limits: ServingLimits) -> int:
    """Output tokens that fit behind a prompt on every decode node, or else on the largest one."""
    common = limits.common_tokens if num_prompt < limits.common_tokens else limits.total_tokens
    return min(limits.context_length, common) - num_prompt


def _sampling_params(
    body: SamplingFields,
    limits: ServingLimits,
    *,
    max_new_tokens: int,
    minimum: str,
    logprobs: int | None,
    prefix: str = "",
) -> SamplingParams:
    """The client's fields over the model's defaults.

    Args:
        minimum: the name of the field that says how many tokens there must be.
        prefix: of the fields' names in errors.
    """
    min_tokens: int = getattr(body, minimum) or 0
    if min_tokens > max_new_tokens:
        raise refuse(f"{min_tokens} is more than the {max_new_tokens} tokens allowed", prefix + minimum)
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
    is_greedy = temperature < GREEDY_BELOW or top_p == 0.0  # then only the most likely token is left
    return SamplingParams(
        max_new_tokens=max(max_new_tokens, 1),  # 0 still makes one token on the nodes; it is not shown
        temperature=0.0 if is_greedy else temperature,
        top_k=int(top_k) if 0 < top_k < limits.vocab_size else 0,
        top_p=top_p or 1.0,
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
        if given := getattr(body, name):
            check_vocabulary(given, limits.vocab_size, prefix + name)


def _stop_strings(given: str | list[str], param: str) -> tuple[str, ...]:
    """Refuse too many and too long stop strings. Empty ones ask for nothing."""
    stops = [given] if isinstance(given, str) else given
    if len(stops) > MAX_STOPS:
        raise refuse(f"has {len(stops)} stop strings, at most {MAX_STOPS} are allowed", param)
    if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise refuse(f"a stop string can have at most {MAX_STOP_LENGTH} characters", param)
    return tuple(stop for stop in stops if stop)


def _bound(sampling: SamplingParams, context: _Context) -> SamplingParams:
    """The parameters with bad words, a grammar and the budget of the reasoning, of which most requests have none."""
    grammar, thinking = context.output.grammar, context.output.thinking
    if not (context.bad_words or grammar or thinking):
        return sampling
    return sampling._replace(bad_words=context.bad_words, grammar=grammar, thinking=thinking)


def _truncation(body: OpenAIRequest, default_max: int | None) -> Truncation | None:
    keep = body.truncate_prompt_tokens
    if keep is None:
        return None
    return truncation_of(keep, body.truncation_side, default_max if body.max_tokens is None else body.max_tokens)


def _has_parts(body: ChatCompletionRequest, model: ServedModel) -> bool:
    """Whether the answer may have parts beside its text."""
    asks = body.tools or body.tool_choice or body.thinking_budget is not None or body.thinking_token_budget is not None
    return bool(asks) or model.formats.reasoning is not None


def _check_stream_options(body: OpenAIRequest) -> None:
    if not body.stream:
        raise refuse("only together with stream: true", "stream_options")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise refuse("continuous_usage_stats needs include_usage", "stream_options")


def _samples(request: GenerateRequest, count: int, *, prompt_number: int = 0) -> list[GenerateRequest]:
    """``count`` samples of one prompt. Sample i has the seed ``seed + i``, so that each can be repeated alone."""
    if count == 1:
        return [msgspec.structs.replace(request, prompt_number=prompt_number) if prompt_number else request]
    return [
        msgspec.structs.replace(
            request,
            rid=f"{request.rid}-{i}",
            prompt_number=prompt_number,
            sampling=request.sampling._replace(seed=(request.sampling.seed + i) % 2**64),
        )
        for i in range(count)
    ]


def _expected_output(context: _Context, prompt: tuple[int, ...], sampling: SamplingParams) -> int:
    """Predicted number of output tokens; 0 without a prediction."""
    if sampling.ignore_eos:
        return sampling.max_new_tokens
    expected = context.model.predictor.expected(context.tenant, prompt)
    return min(max(expected, sampling.min_tokens), sampling.max_new_tokens) if expected else 0
