"""Takes the prompts of a body apart, cuts them, and says why they do not fit. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import ErrorCode, RequestError
from gateway.http.protocol.decoding import refuse
from gateway.workers.registry import ServingLimits

MAX_PROMPTS = 4096
#: Characters of the longest ordinary tokens.
LONGEST_TOKEN = 16
#: A prompt that is cut to what fits leaves this share of the context to an output without a limit: a quarter.
OUTPUT_SHARE = 4

Prompt = str | Sequence[int]


def request_ids(given: str | list[str] | None, request_id: str, count: int, is_batch: bool) -> list[str]:
    """One request id for each prompt."""
    if given is None or isinstance(given, str):
        rid = request_id if given is None else given
        return [rid] if count == 1 else [f"{rid}-{i}" for i in range(count)]
    given = broadcast(given, count, is_batch, "rid")
    if len(set(given)) != count:
        raise refuse("has the same id twice; ids must be distinct", "rid")
    return given


def broadcast(given: Any, count: int, is_batch: bool, param: str) -> list[Any]:
    """One value for each prompt."""
    if not isinstance(given, list):
        return [given] * count
    if not is_batch:
        raise refuse("must not be a list, since there is a single prompt", param)
    if len(given) != count:
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


def check_num_outputs(num_prompts: int, num_samples: int, most: int, prompts: str, samples: str) -> None:
    """Refuse more outputs than can be in flight at once, before any is made.

    Args:
        prompts, samples: the fields that ask for them.
    """
    count = num_prompts * num_samples
    if count > most:
        message = f"{count} outputs in one request, at most {most} can be in flight; split the request"
        raise refuse(message, prompts if num_prompts > 1 else samples)


def check_vocabulary(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Refuse ids that the model does not have. A tokenizer may have more ids than its model."""
    smallest, largest = min(ids, default=0), max(ids, default=0)
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise refuse(f"token id {wrong} is not in the vocabulary, which has {vocab_size} ids", param)


def too_long(count: str, context_length: int, param: str) -> RequestError:
    message = f"the prompt has {count} tokens, and at least one is for the output; shorten it"
    return beyond_context(message, context_length, param)


@dataclass(frozen=True, slots=True)
class Truncation:
    """``truncate_prompt_tokens`` and ``truncation_side``: which tokens of a prompt are kept.

    Attributes:
        keep: this many tokens; None for as many as fit beside the output.
        num_output: tokens that the output may have; None for no limit.
        is_start_kept: the first tokens are kept instead of the last.
    """

    keep: int | None
    num_output: int | None
    is_start_kept: bool = False

    def of_ids(self, prompt: Sequence[int], limits: ServingLimits) -> Sequence[int]:
        keep = self._num_fitting(limits) if self.keep is None else self.keep
        if len(prompt) <= keep:
            return prompt
        return prompt[:keep] if self.is_start_kept else prompt[-keep:]

    def _num_fitting(self, limits: ServingLimits) -> int:
        num_total = min(limits.context_length, limits.total_tokens)
        num_output = num_total // OUTPUT_SHARE if self.num_output is None else self.num_output
        return max(min(num_total - max(num_output, 1), limits.prompt_tokens), 1)

    def of_text(self, text: str, limits: ServingLimits) -> str:
        """A part of the text that surely has the tokens to be kept, so that a long text costs no more."""
        length = max(LONGEST_TOKEN * limits.context_length, 1)
        return text[:length] if self.is_start_kept else text[-length:]


def truncation_of(keep: int, side: str | None, num_output: int | None) -> Truncation:
    if keep == 0:
        raise refuse("must be at least 1, or -1 for as many tokens as fit", "truncate_prompt_tokens")
    return Truncation(keep if keep > 0 else None, num_output, is_start_kept=side == "right")


def beyond_context(message: str, context_length: int, param: str) -> RequestError:
    """Clients recognise this error by its text: litellm by the first of the two phrases, LangChain by the second."""
    message = f"this model's maximum context length is {context_length} tokens, but {message}"
    return refuse(f"{message} (context_length_exceeded)", param, ErrorCode.CONTEXT_LENGTH_EXCEEDED)
