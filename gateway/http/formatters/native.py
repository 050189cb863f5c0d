"""Formats answers and stream events of ``/generate``."""

from collections.abc import Sequence
from typing import Any

from common.sampling_params import TokenLogprobs
from gateway.http.formatters.common import (
    DONE,
    ResponseFormatter,
    finite,
    prompt_logprob_entries,
    sse_event,
    token_text,
)
from gateway.http.protocol.native import NativeRequest, NativeSamplingParams
from gateway.requests.input.prompts import is_list_of_prompts
from gateway.requests.output_processor import Delta, OutputStream
from gateway.workers.served_models import ServedModel


class NativeFormatter(ResponseFormatter):
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
        return token_text(self._tokenizer.piece(token)) if self._with_text else None


def finish_reason(output: OutputStream) -> dict[str, Any] | None:
    """SGLang's ``finish_reason``; None before the end."""
    if output.finish == "stop":
        return {"type": "stop", "matched": output.matched}
    if output.finish == "length":
        return {"type": "length", "length": len(output.ids)}
    return None
