"""Turns prompts and chats into token ids, and token ids into text, without holding up the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common.errors import ErrorCode
from gateway.http.protocol.decoding import refuse
from gateway.http.protocol.native import TokenizeRequest
from gateway.http.protocol.openai import ChatCompletionRequest
from gateway.requests.chat_output import narrow_tools
from gateway.requests.prompt_input import LONGEST_TOKEN, Prompt, Truncation, check_prompt, too_long
from gateway.text.chat_template import num_parts, render_chat, tools_size
from gateway.text.tokenizer import LIST_IDS, LONG_CHARACTERS, LONG_IDS
from gateway.workers.registry import ServingLimits
from gateway.workers.served_models import ServedModel

#: Chats with more messages and parts than this are rendered on the thread; each part takes some microseconds.
MANY_PARTS = 1024
#: Chats with larger tools than this, in bytes of JSON, are rendered on the thread, which also writes their grammar.
LARGE_TOOLS = 64 << 10
#: Fixed cost of one tokenizer call, expressed in characters.
CALL_CHARACTERS = 128

Made = TypeVar("Made")


class PromptTokenizer:
    """Renders, tokenizes and detokenizes for all served models; slow work runs on one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._num_characters = 0  # tokenized on the event loop since its last turn

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def render(self, model: ServedModel, body: ChatCompletionRequest | TokenizeRequest) -> str:
        """A chat through the model's chat template; a large one on the thread. Raises RequestError."""
        template = model.chat_template
        if template is None:
            raise refuse("the model has no chat template; use /v1/completions", "messages", ErrorCode.NOT_SUPPORTED)
        if isinstance(body, ChatCompletionRequest):
            narrow_tools(body)
        if num_parts(body) > MANY_PARTS or tools_size(body) > LARGE_TOOLS:
            return await self.on_thread(lambda: render_chat(template, body))
        return render_chat(template, body)

    async def count_tokens(self, model: ServedModel, body: ChatCompletionRequest) -> int:
        """Tokens of the prompt that a chat becomes. Raises RequestError."""
        text = await self.render(model, body)
        return len(await self.tokenize(model, text, add_special_tokens=False, param="messages"))

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
                if truncation is None:
                    await self._check_text(model, limits, prompt, param)
                else:
                    prompt = truncation.of_text(prompt, limits)
                prompt = await self.tokenize(model, prompt, add_special_tokens=add_special_tokens, param=param)
            if truncation is not None:
                prompt = truncation.of_ids(prompt, limits)
            check_prompt(prompt, limits, param)
            ids.append(prompt)
        return ids

    async def _check_text(self, model: ServedModel, limits: ServingLimits, text: str, param: str) -> None:
        """Refuses a text that is far too long after tokenizing only its beginning."""
        length = limits.context_length
        if len(text) > max(LONGEST_TOKEN * length, LONG_CHARACTERS):
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
