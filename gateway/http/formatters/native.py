"""Formats answers and stream events of ``/generate``."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from common.sampling_params import TokenLogprobs
from common.wire.packed_logprobs import PackedLogprobs, unpack_logprobs
from gateway.http.formatters.common import (
    DONE,
    ResponseFormatter,
    as_json,
    encode_json,
    finite,
    json_list,
    prompt_logprob_entries,
    prompt_logprobs_of,
    sse_event,
    token_text,
)
from gateway.http.protocol.native import NativeRequest, NativeSamplingParams
from gateway.requests.input.generate_request import client_rid
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

    def answer(self, outputs: Sequence[OutputStream]) -> Iterator[bytes]:
        if self._is_batch:
            yield from json_list(map(self._answer, outputs))
        else:
            yield encode_json(self._answer(outputs[0]))

    def _answer(self, output: OutputStream) -> dict[str, Any]:
        logprobs = self._logprobs(output, 0, output.ids, output.logprobs)
        meta = self._meta(output, len(output.ids), logprobs, is_ended=True)
        return {"text": output.text, "output_ids": output.ids, "meta_info": meta}

    def _meta(
        self, output: OutputStream, num_tokens: int, logprobs: dict[str, Any], *, is_ended: bool
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": client_rid(output.request.rid),
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
        self, output: OutputStream, first: int, ids: Sequence[int], logprobs: Sequence[PackedLogprobs]
    ) -> dict[str, Any]:
        """The fields with the log-probabilities of output tokens from ``first`` on; from 0 on also of the prompt's."""
        if not self._with_logprobs:
            return {}
        fields = self._fields("output", list(zip(ids, logprobs, strict=False)))
        if first == 0:
            with prompt_logprobs_of(output):
                fields |= self._fields("input", prompt_logprob_entries(output))
        return fields

    def _fields(self, prefix: str, logprobs: Sequence[tuple[int, PackedLogprobs | None]]) -> dict[str, Any]:
        """The fields with the log-probabilities of these tokens and of the alternatives to them."""
        entries: list[tuple[float | None, int, str | None]] = []
        tops: list[msgspec.Raw | None] = []
        for token, packed in logprobs:
            entry = None if packed is None else unpack_logprobs(packed)
            entries.append((None if entry is None else finite(entry.token), token, self._shown(token)))
            tops.append(None if entry is None else as_json(self._tops(entry)))
        return {f"{prefix}_token_logprobs": entries, f"{prefix}_top_logprobs": tops}

    def _logprobs_so_far(self, output: OutputStream, new: dict[str, Any]) -> dict[str, Any]:
        """The fields with all log-probabilities so far. Each is encoded once, though all later events show it too."""
        encoded = self._encoded.setdefault(output.number, {})
        for name, entries in new.items():
            encoded[name] = b",".join(filter(None, (encoded.get(name), encode_json(entries)[1:-1])))
        return {name: msgspec.Raw(b"[%b]" % entries) for name, entries in encoded.items()}

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
