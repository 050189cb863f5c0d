"""Formats answers and stream chunks of OpenAI's and SGLang's APIs, and errors in OpenAI's envelope."""

import math
import time
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import msgspec

from common.errors import ErrorCode, RequestError
from common.sampling_params import TokenLogprobs
from gateway.http.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    NativeRequest,
    NativeSamplingParams,
    StreamOptions,
)
from gateway.requests.input_processor import is_list_of_prompts
from gateway.requests.output_processor import Delta, OutputStream
from gateway.workers.served_models import ServedModel

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI uses this value

encode_json = msgspec.json.Encoder().encode

ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 408: "timeout_error",
    413: "invalid_request_error", 429: "rate_limit_error", 499: "aborted_error", 504: "timeout_error",
}  # fmt: skip


def sse_event(data: Any) -> bytes:
    return b"data: " + encode_json(data) + b"\n\n"


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in OpenAI's envelope."""
    kind = ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": str(error.code)}}


def usage(outputs: Sequence[OutputStream]) -> dict[str, Any]:
    """OpenAI's ``usage`` over all outputs of a request; each prompt counts once, however many samples it has."""
    prompts: dict[int, tuple[int, int]] = {}
    for output in outputs:
        number, cached = output.request.prompt_number, output.cached_tokens
        known = prompts.get(number)  # the first sample computed what the others found in the cache
        prompts[number] = (len(output.request.prompt), cached if known is None else min(known[1], cached))
    prompt = sum(length for length, _ in prompts.values())
    completion = sum(len(output.ids) for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in prompts.values())},
    }


def prompt_logprob_entries(output: OutputStream) -> list[tuple[int, TokenLogprobs | None]]:
    """Prompt tokens from ``logprob_start`` on with their log-probabilities; the first has none."""
    first = output.request.logprob_start
    if first is None:
        return []
    return list(zip(output.request.prompt[first:], chain([None], output.prompt_logprobs, repeat(None)), strict=False))


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


class _OpenAIFormatter:
    """Common part of both OpenAI endpoints."""

    kind = ""
    chunk_kind = ""

    def __init__(self, model: ServedModel, body: CompletionRequest | ChatCompletionRequest, request_id: str) -> None:
        self._tokenizer = model.tokenizer
        self._head = {"id": request_id, "object": "", "created": int(time.time()), "model": model.name}
        options = body.stream_options or StreamOptions()
        self._with_usage = bool(options.include_usage)  # at the end of a stream ...
        self._with_usage_each = bool(options.continuous_usage_stats)  # ... and also in each chunk
        self._with_logprobs = body.logprobs is not None and body.logprobs is not False
        self._with_ids = bool(body.return_token_ids)
        self._offsets: dict[int, int] = {}

    def first(self, outputs: Sequence[OutputStream]) -> bytes:
        """The bytes that begin a stream."""
        return b""

    def chunk(self, output: OutputStream, delta: Delta) -> bytes:
        """One stream chunk; empty if there is nothing to show."""
        is_echo = delta.first == 0 and bool(output.request.echo)
        has_details = bool(delta.ids) and (self._with_logprobs or self._with_ids)
        if not (delta.text or delta.is_last or is_echo or has_details):
            return b""
        chunk = {**self._head, "object": self.chunk_kind, "choices": [self._chunk_choice(output, delta)]}
        if self._with_usage:
            chunk["usage"] = usage([output]) if self._with_usage_each else None
        return sse_event(chunk)

    def last(self, outputs: Sequence[OutputStream]) -> bytes:
        """The bytes that end a stream."""
        if not self._with_usage:
            return DONE
        return sse_event({**self._head, "object": self.chunk_kind, "choices": [], "usage": usage(outputs)}) + DONE

    def answer(self, outputs: Sequence[OutputStream]) -> dict[str, Any]:
        choices = [self._choice(output) for output in outputs]
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage(outputs)}

    def _chunk_choice(self, output: OutputStream, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, output: OutputStream) -> dict[str, Any]:
        raise NotImplementedError

    def _finish(
        self, output: OutputStream, choice: dict[str, Any], ids: Iterable[int], is_last: bool = True
    ) -> dict[str, Any]:
        choice["finish_reason"] = output.finish if is_last else None
        if is_last:
            choice["stop_reason"] = output.matched
        if self._with_ids:
            choice["token_ids"] = list(ids)
        return choice


class CompletionFormatter(_OpenAIFormatter):
    """``text_completion``."""

    kind = chunk_kind = "text_completion"

    def _chunk_choice(self, output: OutputStream, delta: Delta) -> dict[str, Any]:
        text = output.request.echo + delta.text if delta.first == 0 else delta.text
        choice = {"index": output.number, "text": text, "logprobs": self._logprobs(output, delta)}
        return self._finish(output, choice, delta.ids, delta.is_last)

    def _choice(self, output: OutputStream) -> dict[str, Any]:
        return self._chunk_choice(output, Delta(output.text, 0, output.ids, output.logprobs, is_last=True))

    def _logprobs(self, output: OutputStream, delta: Delta) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        entries = list(zip(delta.ids, delta.logprobs, strict=False))
        if delta.first == 0:
            entries = prompt_logprob_entries(output) + entries
        offset = self._offsets.get(output.number, 0)
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, entry in entries:
            shown = self._tokenizer.piece(token).decode(errors="replace")
            tokens.append(shown)
            offsets.append(offset)
            offset += len(shown)
            values.append(None if entry is None else finite(entry.token))
            tops.append(None if entry is None else self._tops(shown, entry))
        self._offsets[output.number] = offset
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}

    def _tops(self, shown: str, entry: TokenLogprobs) -> dict[str, float]:
        tops: dict[str, float] = {}
        for token, logprob in entry.top:
            tops.setdefault(self._tokenizer.piece(token).decode(errors="replace"), finite(logprob))
        tops.setdefault(shown, finite(entry.token))
        return tops


class ChatFormatter(_OpenAIFormatter):
    """``chat.completion`` and its chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first(self, outputs: Sequence[OutputStream]) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": output.number, "delta": delta, "logprobs": None, "finish_reason": None} for output in outputs
        ]
        return sse_event({**self._head, "object": self.chunk_kind, "choices": choices})

    def _chunk_choice(self, output: OutputStream, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        logprobs = self._logprobs(delta.ids, delta.logprobs)
        choice = {"index": output.number, "delta": content, "logprobs": logprobs}
        return self._finish(output, choice, delta.ids, delta.is_last)

    def _choice(self, output: OutputStream) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        logprobs = self._logprobs(output.ids, output.logprobs)
        return self._finish(output, {"index": output.number, "message": message, "logprobs": logprobs}, output.ids)

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = []
        for token, entry in zip(ids, logprobs, strict=False):
            if entry is not None:
                tops = [self._entry(*top) for top in entry.top]
                content.append({**self._entry(token, entry.token), "top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.piece(token)
        return {"token": piece.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(piece)}


class NativeFormatter:
    """Answers and stream events of ``/generate``.

    Args:
        is_incremental: stream events carry only new text instead of the whole text so far.
    """

    def __init__(self, model: ServedModel, body: NativeRequest, request_id: str, *, is_incremental: bool) -> None:
        self._tokenizer = model.tokenizer
        self._with_logprobs = bool(body.return_logprob)
        self._with_text = bool(body.return_text_in_logprobs)  # of each token with its log-probability
        params, prompts = body.sampling_params, body.text if body.text is not None else body.input_ids
        has_samples = isinstance(params, NativeSamplingParams) and (params.n or 1) > 1
        self._is_batch = has_samples or is_list_of_prompts(prompts)
        self._is_incremental = is_incremental

    def first(self, outputs: Sequence[OutputStream]) -> bytes:
        return b""

    def chunk(self, output: OutputStream, delta: Delta) -> bytes:
        first, text, ids = (
            (delta.first, delta.text, delta.ids) if self._is_incremental else (0, output.text, output.ids)
        )
        body: dict[str, Any] = {"text": text, "output_ids": ids, "meta_info": self._meta(output, first)}
        if self._is_batch:
            body["index"] = output.number
        return sse_event(body)

    def last(self, outputs: Sequence[OutputStream]) -> bytes:
        return DONE

    def answer(self, outputs: Sequence[OutputStream]) -> Any:
        answers = [
            {"text": output.text, "output_ids": output.ids, "meta_info": self._meta(output, 0)} for output in outputs
        ]
        return answers if self._is_batch else answers[0]

    def _meta(self, output: OutputStream, first: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": output.request.rid,
            "finish_reason": finish_reason(output),
            "prompt_tokens": len(output.request.prompt),
            "completion_tokens": len(output.ids),
            "cached_tokens": output.cached_tokens,
        }
        if self._with_logprobs:
            entries = list(zip(output.ids[first:], output.logprobs[first:], strict=False))
            meta["output_token_logprobs"] = [self._entry(token, entry) for token, entry in entries if entry is not None]
            meta["output_top_logprobs"] = [self._tops(entry) for _, entry in entries if entry is not None]
            if first == 0:
                prompt = prompt_logprob_entries(output)
                meta["input_token_logprobs"] = [self._entry(token, entry) for token, entry in prompt]
                meta["input_top_logprobs"] = [None if entry is None else self._tops(entry) for _, entry in prompt]
        if output.is_ended:
            meta["e2e_latency"] = output.ended_at - output.started_at
            meta["time_to_first_token"] = max(output.first_at - output.started_at, 0.0)
            meta["timings"] = output.timings
        return meta

    def _entry(self, token: int, entry: TokenLogprobs | None) -> tuple[float | None, int, str | None]:
        return (None if entry is None else finite(entry.token), token, self._shown(token))

    def _tops(self, entry: TokenLogprobs) -> list[tuple[float, int, str | None]]:
        return [(finite(logprob), token, self._shown(token)) for token, logprob in entry.top]

    def _shown(self, token: int) -> str | None:
        return self._tokenizer.piece(token).decode(errors="replace") if self._with_text else None


ResponseFormatter = CompletionFormatter | ChatFormatter | NativeFormatter


def finish_reason(output: OutputStream) -> dict[str, Any] | None:
    """SGLang's ``finish_reason``; None before the end."""
    if output.finish == "stop":
        return {"type": "stop", "matched": output.matched}
    if output.finish == "length":
        return {"type": "length", "length": len(output.ids)}
    return None


def as_error(error: BaseException) -> RequestError:
    """Any exception as a ``RequestError``; an unexpected one becomes an internal error."""
    if isinstance(error, RequestError):
        return error
    return RequestError(ErrorCode.INTERNAL, "the gateway failed on this request; its log says more")
