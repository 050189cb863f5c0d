"""Formats answers and stream events of ``/generate``."""

from collections.abc import Sequence
from typing import Any

import msgspec

from common.sampling_params import TokenLogprobs
from gateway.http.formatters.common import (
    DONE,
    ResponseFormatter,
    encode_json,
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
        self._encoded: dict[int, dict[str, bytes]] = {}  # log-probabilities so far, by number of the output and field

    def first(self, outputs: Sequence[OutputStream]) -> bytes:
        return b""

    def chunk(self, output: OutputStream, delta: Delta) -> bytes:
        logprobs = self._logprobs(output, delta.first, delta.ids, delta.logprobs)
        if not self._is_incremental:
            logprobs = self._logprobs_so_far(output, logprobs)
        is_delta = self._is_incremental or not delta.first  # a long first event is made while the output goes on
        text, ids = (delta.text, delta.ids) if is_delta else (output.text, output.ids)
        meta = self._meta(output, delta.first + len(delta.ids), logprobs, is_ended=delta.is_last)
        body: dict[str, Any] = {"text": text, "output_ids": ids, "meta_info": meta}
        if self._is_batch:
            body["index"] = output.number
        return sse_event(body)

    def last(self, outputs: Sequence[OutputStream]) -> bytes:
        return DONE

    def answer(self, outputs: Sequence[OutputStream]) -> Any:
        answers = [self._answer(output) for output in outputs]
        return answers if self._is_batch else answers[0]

    def _answer(self, output: OutputStream) -> dict[str, Any]:
        logprobs = self._logprobs(output, 0, output.ids, output.logprobs)
        meta = self._meta(output, len(output.ids), logprobs, is_ended=True)
        return {"text": output.text, "output_ids": output.ids, "meta_info": meta}

    def _meta(
        self, output: OutputStream, num_tokens: int, logprobs: dict[str, Any], *, is_ended: bool
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": output.request.rid,
            "finish_reason": finish_reason(output) if is_ended else None,
            "prompt_tokens": len(output.request.prompt),
            "completion_tokens": num_tokens,
            "cached_tokens": output.cached_tokens,
            **logprobs,
        }
        if is_ended:
            meta["e2e_latency"] = output.ended_at - output.started_at
            meta["time_to_first_token"] = max(output.first_at - output.started_at, 0.0)
            meta["timings"] = output.timings
        return meta

    def _logprobs(
        self, output: OutputStream, first: int, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """The fields with the log-probabilities of output tokens from ``first`` on; from 0 on also of the prompt's."""
        if not self._with_logprobs:
            return {}
        entries = [(token, entry) for token, entry in zip(ids, logprobs, strict=False) if entry is not None]
        fields: dict[str, Any] = {
            "output_token_logprobs": [self._entry(token, entry) for token, entry in entries],
            "output_top_logprobs": [self._tops(entry) for _, entry in entries],
        }
        if first == 0:
            prompt = prompt_logprob_entries(output)
            fields["input_token_logprobs"] = [self._entry(token, entry) for token, entry in prompt]
            fields["input_top_logprobs"] = [None if entry is None else self._tops(entry) for _, entry in prompt]
        return fields

    def _logprobs_so_far(self, output: OutputStream, new: dict[str, Any]) -> dict[str, Any]:
        """The fields with all log-probabilities so far. Each is encoded once, though all later events show it too."""
        encoded = self._encoded.setdefault(output.number, {})
        for name, entries in new.items():
            encoded[name] = b",".join(filter(None, (encoded.get(name), encode_json(entries)[1:-1])))
        return {name: msgspec.Raw(b"[%b]" % entries) for name, entries in encoded.items()}

    def _entry(self, token: int, entry: TokenLogprobs | None) -> tuple[float | None, int, str | None]:
        return (None if entry is None else finite(entry.token), token, self._shown(token))

    def _tops(self, entry: TokenLogprobs) -> list[tuple[float, int, str | None]]:
        return [(finite(logprob), token, self._shown(token)) for token, logprob in entry.top]

    def _shown(self, token: int) -> str | None:
        return token_text(self._tokenizer.piece(token)) if self._with_text else None


def finish_reason(output: OutputStream) -> dict[str, Any] | None:
    """SGLang's ``finish_reason`` of an ended output."""
    if output.finish == "stop":
        return {"type": "stop", "matched": output.matched}
    if output.finish == "length":
        return {"type": "length", "length": len(output.ids)}
    return None
