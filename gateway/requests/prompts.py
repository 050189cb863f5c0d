"""The prompts of a body: taken apart, cut, turned into token ids, and refused if no node can take them."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from common.errors import ErrorCode, RequestError
from gateway.http.protocol.decoding import refuse
from gateway.text.tokenizer import LIST_IDS, LONG_CHARACTERS, LONG_IDS
from gateway.workers.registry import ServingLimits
from gateway.workers.served_models import ServedModel

MAX_PROMPTS = 4096
#: Characters of the longest ordinary tokens.
LONGEST_TOKEN = 16

#: Fixed cost of one tokenizer call, expressed in characters.
CALL_CHARACTERS = 128

Prompt = str | Sequence[int]
Made = TypeVar("Made")


def request_ids(given: str | list[str] | None, request_id: str, count: int, is_batch: bool) -> list[str]:
    """One request id for each prompt."""
    if given is None or isinstance(given, str):
        rid = request_id if given is None else given
        return [rid] if count == 1 else [f"{rid}-{i}" for i in range(count)]
    if len(given) != count or not is_batch:
        raise refuse(f"has {len(given)} ids for {count} prompts", "rid")
    if len(set(given)) != count:
        raise refuse("has the same id twice; ids must be distinct", "rid")
    return given


def broadcast(given: Any, count: int, is_batch: bool, param: str) -> list[Any]:
    """One value for each prompt."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count or not is_batch:
        raise refuse(f"has {len(given)} values for {count} prompts", param)
    return given


def is_list_of_prompts(given: Any) -> bool:
    """Whether ``text`` or ``input_ids`` of ``/generate`` are several prompts, perhaps a list of one."""
    return isinstance(given, list) and bool(given) and not isinstance(given[0], int)


def split_prompts(given: Any, param: str) -> list[Prompt]:
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


def check_num_outputs(num_prompts: int, num_samples: int, most: int, param: str) -> None:
    """Refuses more outputs than can be in flight at once, before any is made."""
    count = num_prompts * num_samples
    if count > most:
        raise refuse(f"{count} outputs in one request, at most {most} can be in flight; split the request", param)


def too_long(count: str, context_length: int, param: str) -> RequestError:
    return beyond_context(f"the prompt has {count} tokens, and at least one is for the output", context_length, param)


@dataclass(frozen=True, slots=True)
class Truncation:
    """``truncate_prompt_tokens`` and ``truncation_side``: which tokens of a prompt are kept.

    Attributes:
        keep: this many tokens; None for as many as a node can take.
        is_start_kept: the first tokens are kept instead of the last.
    """

    keep: int | None
    is_start_kept: bool = False

    def of_ids(self, prompt: Sequence[int], limits: ServingLimits) -> Sequence[int]:
        keep = min(limits.context_length - 1, limits.prompt_tokens, limits.total_tokens - 1)
        if self.keep is not None:
            keep = self.keep
        if len(prompt) <= keep:
            return prompt
        return prompt[:keep] if self.is_start_kept else prompt[-keep:]

    def of_text(self, text: str, limits: ServingLimits) -> str:
        """A part of the text that surely has the tokens to be kept, so that a long text costs no more."""
        length = max(LONGEST_TOKEN * limits.context_length, 1)
        return text[:length] if self.is_start_kept else text[-length:]


def truncation_of(keep: int, side: str | None) -> Truncation:
    if keep == 0:
        raise refuse("must be at least 1, or -1 for as many tokens as fit", "truncate_prompt_tokens")
    return Truncation(keep if keep > 0 else None, is_start_kept=side == "right")


def beyond_context(message: str, context_length: int, param: str) -> RequestError:
    """Clients recognise this error by its text: litellm by the first of the two phrases, LangChain by the second."""
    message = f"this model's maximum context length is {context_length} tokens, but {message}; shorten the prompt"
    return refuse(f"{message} (context_length_exceeded)", param, ErrorCode.CONTEXT_LENGTH_EXCEEDED)


def check_prompt(prompt: Sequence[int], limits: ServingLimits, param: str) -> None:
    """Refuses a prompt that no node can take."""
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
    smallest, largest = min(prompt), max(prompt)
    if smallest < 0 or largest >= limits.vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise refuse(f"token id {wrong} is not in the vocabulary, which has {limits.vocab_size} ids", param)


class PromptTokenizer:
    """Renders, tokenizes and detokenizes for all served models; slow work runs on one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._num_characters = 0  # tokenized on the event loop since its last turn

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def tokenize(self, model: ServedModel, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text. A long text is tokenized on the thread; many short ones yield to the event loop."""
        if len(text) <= LONG_CHARACTERS:
            self._num_characters += len(text) + CALL_CHARACTERS
            if self._num_characters > LONG_CHARACTERS:
                self._num_characters = 0
                await asyncio.sleep(0)
            return model.tokenizer.encode(text, add_special_tokens=add_special_tokens, param=param)
        return await self.on_thread(
            lambda: model.tokenizer.encode(text, add_special_tokens=add_special_tokens, param=param)
        )

    async def tokenize_all(
        self,
        model: ServedModel,
        limits: ServingLimits,
        prompts: Sequence[Prompt],
        param: str,
        truncation: Truncation | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[Sequence[int]]:
        """Token ids of prompts that nodes can take. Raises RequestError for others."""
        ids: list[Sequence[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                if not prompt:
                    raise refuse("must not be empty", param)
                if truncation is not None:
                    prompt = truncation.of_text(prompt, limits)
                elif len(prompt) > LONG_CHARACTERS:
                    await self._check_text(model, limits, prompt, param)
                prompt = await self.tokenize(model, prompt, add_special_tokens=add_special_tokens, param=param)
            if truncation is not None:
                prompt = truncation.of_ids(prompt, limits)
            check_prompt(prompt, limits, param)
            ids.append(prompt)
        return ids

    async def _check_text(self, model: ServedModel, limits: ServingLimits, text: str, param: str) -> None:
        """Refuses a text that is far too long after tokenizing only its beginning."""
        length = limits.context_length
        if len(text) > LONGEST_TOKEN * length:
            beginning = text[: 8 * length]
            count = len(await self.tokenize(model, beginning, add_special_tokens=False, param=param))
            if count > length + length // 2:  # a margin for the word that the cut has split
                raise too_long(f"more than {length}", length, param)

    async def detokenize(self, model: ServedModel, lists: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
        """Texts of lists of token ids; many ids are decoded on the thread."""
        if sum(map(len, lists)) + LIST_IDS * len(lists) <= LONG_IDS:
            return [model.tokenizer.decode(ids, skip_special=skip_special) for ids in lists]
        return await self.on_thread(lambda: model.tokenizer.decode_all(lists, skip_special=skip_special))

    async def on_thread(self, make: Callable[[], Made]) -> Made:
        """Runs slow work with text off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)
