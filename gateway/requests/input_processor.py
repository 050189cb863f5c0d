"""From a decoded body to what is asked of the nodes: prompts in token ids, sampling parameters complete, limits kept.

Whoever asks for what cannot be given (a prompt longer than the context or than any node's pool, an output that cannot
fit) learns it here, at once, with the field at fault.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from common.errors import ErrorCode
from common.sampling_params import SamplingParams
from common.scheduling.output_length_predictor import OutputLengthPredictor
from gateway.http.protocol import (
    Chat,
    ChatMessage,
    Completion,
    Native,
    NativeSampling,
    OpenAI,
    Sampling,
    check_no_effect,
    refuse,
)
from gateway.requests.output_processor import GenerateRequest
from gateway.requests.priority import RequestPriority
from gateway.requests.validation import (
    Prompt,
    check_count,
    check_prompt,
    check_stream_options,
    judged,
    max_tokens,
    plain_message,
    samples,
    sampling_params,
    split_prompts,
    spread,
    stop_strings,
    tokens_left,
    too_long,
)
from gateway.text.chat_template import RESERVED, ChatTemplate
from gateway.text.tokenizer import LIST_IDS, LONG_CHARACTERS, LONG_IDS, Text
from gateway.workers.registry import Limits

COMPLETION_MAX_TOKENS = 16
NATIVE_MAX_TOKENS = 128
#: Chats of more messages (or parts of them) are worth a thread: each takes some microseconds.
MANY_PARTS = 1024
#: What a tokenizer does for any text, however short, in characters.
TEXT_CHARACTERS = 128
#: Asks that are made before others have their turn.
ASKS_AT_ONCE = 64
MAX_TEMPLATE_KWARGS = 256

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a request is taken: what the nodes can do, on whose account and how urgent it is, and how many
    outputs are possible at once."""

    limits: Limits
    claim: RequestPriority
    most: int


class InputProcessor:
    """Makes asks out of bodies.

    Args:
        model: the name under which it is served.
        text, chat: the model's tokenizer and chat template.
        request_timeout_s: deadline of requests that name none.
        predictor: knows how long outputs have been.
    """

    def __init__(
        self,
        model: str,
        text: Text,
        chat: ChatTemplate | None,
        *,
        request_timeout_s: float,
        predictor: OutputLengthPredictor,
    ) -> None:
        self._model = model
        self._text = text
        self._chat = chat
        self._predictor = predictor
        self._request_timeout_s = request_timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._num_at_once = 0  # characters that were tokenized while nothing else could run

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- the three kinds of body --------------------------------------------------------------------------------

    async def completion(self, body: Completion, request_id: str, terms: Terms) -> list[GenerateRequest]:
        """One ask for each sample of each prompt, prompt after prompt."""
        check_stream_options(body)
        if body.best_of not in (None, body.n or 1):
            raise refuse("only supported if it equals n", "best_of", ErrorCode.NOT_SUPPORTED)
        if body.max_tokens == 0 and not body.echo:
            raise refuse("must be at least 1, unless echo is true", "max_tokens")
        prompts = split_prompts(body.prompt)
        check_count(len(prompts), body.n or 1, terms.most, "prompt")
        ids = await self._tokenize_all(prompts, "prompt", terms.limits)
        rids = [request_id] if len(ids) == 1 else [f"{request_id}-{i}" for i in range(len(ids))]
        asks: list[GenerateRequest] = []
        for i, prompt in enumerate(ids):
            ask = self._openai_ask(body, rids[i], request_id, prompt, terms, COMPLETION_MAX_TOKENS, body.logprobs)
            if body.echo:
                ask = await self._echoed(ask, prompts[i], is_prompt_only=body.max_tokens == 0)
            asks += samples(ask, body.n or 1, prompt_number=i)
            await self._turn(i)
        return asks

    async def _echoed(self, ask: GenerateRequest, prompt: Prompt, *, is_prompt_only: bool) -> GenerateRequest:
        """The same with the prompt shown, and judged if log-probabilities are wanted."""
        text = prompt if isinstance(prompt, str) else (await self.detokenize([prompt], ask.skip_special))[0]
        ask = dataclasses.replace(ask, echo=text, is_prompt_only=is_prompt_only)
        return ask if ask.sampling.logprobs is None else judged(ask, 0, "logprobs")

    async def chat(self, body: Chat, request_id: str, terms: Terms) -> list[GenerateRequest]:
        """One ask for each sample: the messages through the model's chat template."""
        check_stream_options(body)
        if body.max_completion_tokens is not None:
            if body.max_tokens not in (None, body.max_completion_tokens):
                raise refuse("differs from max_completion_tokens; give one of the two", "max_tokens")
            body.max_tokens = body.max_completion_tokens
        if body.top_logprobs is not None and not body.logprobs:
            raise refuse("needs logprobs to be true", "top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        text = await self.render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
        await self._check_text(text, terms.limits, "messages")
        ids = await self.tokenize(text, add_special_tokens=False, param="messages")
        check_prompt(ids, terms.limits, "messages")
        return samples(self._openai_ask(body, request_id, request_id, ids, terms, None, logprobs), body.n or 1)

    async def native(self, body: Native, request_id: str, terms: Terms) -> tuple[list[GenerateRequest], bool]:
        """One ask for each sample of each prompt, prompt after prompt; and whether the answer is a list."""
        if (body.text is None) == (body.input_ids is None):
            raise refuse("give exactly one of text and input_ids", "text")
        param = "text" if body.text is not None else "input_ids"
        given = body.text if body.text is not None else body.input_ids
        assert given is not None
        is_batch = isinstance(given, list) and (param == "text" or (bool(given) and isinstance(given[0], list)))
        prompts = split_prompts(given, param)
        count = len(prompts)
        sampling = NativeSampling() if body.sampling_params is None else body.sampling_params
        params = spread(sampling, count, is_batch, "sampling_params")
        starts = spread(body.logprob_start_len, count, is_batch, "logprob_start_len")
        num_samples = params[0].n or 1
        if any((other.n or 1) != num_samples for other in params):
            raise refuse("must be the same for all prompts", "sampling_params.n")
        check_count(count, num_samples, terms.most, param)
        rids = self._rids(body.rid, request_id, count, is_batch)
        ids = await self._tokenize_all(prompts, param, terms.limits)
        asks: list[GenerateRequest] = []
        for i in range(count):
            prefix = f"sampling_params[{i}]." if isinstance(body.sampling_params, list) else "sampling_params."
            whole = body.rid if isinstance(body.rid, str) else rids[i] if body.rid else request_id
            ask = self._native_ask(body, params[i], rids[i], whole, ids[i], terms, prefix)
            start = starts[i]
            if start is not None and start >= 0:
                if not body.return_logprob:
                    raise refuse("needs return_logprob to be true", "logprob_start_len")
                ask = judged(ask, start, "logprob_start_len")
            asks += samples(ask, num_samples, prompt_number=i)
            await self._turn(i)
        return asks, is_batch or num_samples > 1

    @staticmethod
    def _rids(given: str | list[str] | None, request_id: str, count: int, is_batch: bool) -> list[str]:
        if given is None:
            return [request_id] if count == 1 else [f"{request_id}-{i}" for i in range(count)]
        if isinstance(given, str):
            return [given] if count == 1 else [f"{given}-{i}" for i in range(count)]
        if len(given) != count or not is_batch:
            raise refuse(f"{len(given)} ids for {count} prompts", "rid")
        if len(set(given)) != count:
            raise refuse("the same id twice", "rid")
        return given

    # ---- pieces --------------------------------------------------------------------------------

    async def render(
        self, messages: list[ChatMessage], add_generation_prompt: bool | None, kwargs: dict[str, Any] | None
    ) -> str:
        """Messages through the chat template, many of them on the thread. Raises RequestError."""
        template = self._chat
        if template is None:
            raise refuse("the model has no chat template; use /v1/completions", "messages", ErrorCode.NOT_SUPPORTED)
        if not messages:
            raise refuse("must not be empty", "messages")
        if kwargs is not None and len(kwargs) > MAX_TEMPLATE_KWARGS:
            raise refuse(f"at most {MAX_TEMPLATE_KWARGS} of them", "chat_template_kwargs")
        for name in kwargs or {}:
            if name in RESERVED:
                raise refuse(f"{name} cannot be set here", "chat_template_kwargs")

        def rendered() -> str:
            plain = [plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
            return template.render(plain, add_generation_prompt=add_generation_prompt is not False, **(kwargs or {}))

        num_parts = sum(len(message.content) if isinstance(message.content, list) else 1 for message in messages)
        return await self._on_thread(rendered) if num_parts > MANY_PARTS else rendered()

    async def tokenize(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text; those of long ones are made on a thread, so that streams go on meanwhile, and between
        many short ones."""
        if len(text) <= LONG_CHARACTERS:
            self._num_at_once += len(text) + TEXT_CHARACTERS
            if self._num_at_once > LONG_CHARACTERS:
                self._num_at_once = 0
                await asyncio.sleep(0)
            return self._text.encode(text, add_special_tokens=add_special_tokens, param=param)

        return await self._on_thread(
            lambda: self._text.encode(text, add_special_tokens=add_special_tokens, param=param)
        )

    async def detokenize(self, lists: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
        """Texts of lists of ids; many are made on the thread."""
        if sum(map(len, lists)) + LIST_IDS * len(lists) <= LONG_IDS:
            return [self._text.decode(ids, skip_special=skip_special) for ids in lists]
        return await self._on_thread(lambda: self._text.decode_all(lists, skip_special=skip_special))

    @staticmethod
    async def _turn(number: int) -> None:
        """Others have theirs after every so many asks."""
        if number % ASKS_AT_ONCE == ASKS_AT_ONCE - 1:
            await asyncio.sleep(0)

    async def _on_thread(self, make: Callable[[], Made]) -> Made:
        """What takes so long that streams should go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    async def _check_text(self, text: str, limits: Limits, param: str) -> None:
        """Refuses a text that is far too long without tokenizing all of it: its beginning is too long already."""
        length = limits.context_length
        if len(text) > max(16 * length, LONG_CHARACTERS):
            count = len(await self.tokenize(text[: 8 * length], add_special_tokens=False, param=param))
            if count > length + length // 2:  # far enough for whatever the cut has done to the last word
                raise too_long(f"more than {length}", length, param)

    async def _tokenize_all(self, prompts: list[Prompt], param: str, limits: Limits) -> list[Sequence[int]]:
        ids: list[Sequence[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                if not prompt:
                    raise refuse("must not be empty", param)
                await self._check_text(prompt, limits, param)
                prompt = await self.tokenize(prompt, add_special_tokens=True, param=param)
            check_prompt(prompt, limits, param)
            ids.append(prompt)
        return ids

    def _openai_ask(
        self, body: OpenAI, rid: str, request_id: str, prompt: Sequence[int], terms: Terms,
        default_max: int | None, logprobs: int | None,
    ) -> GenerateRequest:  # fmt: skip
        default = tokens_left(len(prompt), terms.limits) if default_max is None else default_max
        maximum = max_tokens(body.max_tokens, len(prompt), terms.limits, default, "max_tokens")
        sampling = sampling_params(
            body, terms.limits, max_new_tokens=maximum, min_tokens=body.min_tokens or 0, logprobs=logprobs
        )
        return self._ask(rid, request_id, prompt, sampling, body, body, terms.claim)

    def _native_ask(
        self, body: Native, params: NativeSampling, rid: str, request_id: str, prompt: Sequence[int], terms: Terms,
        prefix: str,
    ) -> GenerateRequest:  # fmt: skip
        check_no_effect(params, prefix)
        given = params.max_new_tokens if params.max_new_tokens is not None else params.max_tokens
        maximum = max_tokens(given, len(prompt), terms.limits, NATIVE_MAX_TOKENS, f"{prefix}max_new_tokens")
        minimum = params.min_new_tokens if params.min_new_tokens is not None else params.min_tokens
        if params.seed is None:
            params.seed = params.sampling_seed
        logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
        sampling = sampling_params(
            params, terms.limits, max_new_tokens=maximum, min_tokens=minimum or 0, logprobs=logprobs, prefix=prefix
        )
        ask = self._ask(rid, request_id, prompt, sampling, params, body, terms.claim, prefix)
        return dataclasses.replace(ask, is_prompt_only=True) if given == 0 else ask

    def _ask(
        self, rid: str, request_id: str, prompt: Sequence[int], sampling: SamplingParams, options: Sampling,
        extras: OpenAI | Native, claim: RequestPriority, prefix: str = "",
    ) -> GenerateRequest:  # fmt: skip
        prompt = tuple(prompt)
        return GenerateRequest(
            rid=rid,
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            model=self._model,
            keep_stop=bool(options.include_stop_str_in_output or options.no_stop_trim),
            stops=stop_strings(options.stop, f"{prefix}stop"),
            skip_special=options.skip_special_tokens is not False,
            salt=extras.cache_salt or "",
            priority=claim.priority,
            is_priority_named=claim.is_named,
            priority_class=claim.priority_class,
            tenant=claim.tenant,
            expected_output=self._expected(claim.tenant, prompt, sampling),
            timeout_s=self._request_timeout_s if extras.deadline_ms is None else extras.deadline_ms / 1000,
        )

    def _expected(self, tenant: str, prompt: tuple[int, ...], sampling: SamplingParams) -> int:
        """Output tokens that there will probably be; 0 if nobody knows."""
        if sampling.ignore_eos:
            return sampling.max_new_tokens
        expected = self._predictor.expected(tenant, prompt)
        return min(max(expected, sampling.min_tokens), sampling.max_new_tokens) if expected else 0
