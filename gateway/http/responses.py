"""What clients see: OpenAI's answers and stream chunks, SGLang's native ones, and errors in OpenAI's envelope.

The common chunk, new text and nothing else, is put together from bytes prepared once for each output.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any, Literal

import msgspec

from common.errors import ErrorCode, RequestError
from common.sampling_params import TokenLogprobs
from gateway.requests.output_processor import Delta, OutputStream
from gateway.text.tokenizer import Text

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's own floor

#: Token counts in a stream: none, at its end, or with each chunk as well.
Usage = Literal["", "last", "each"]

encode_json = msgspec.json.Encoder().encode

ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 408: "timeout_error",
    413: "invalid_request_error", 429: "rate_limit_error", 499: "aborted_error", 504: "timeout_error",
}  # fmt: skip


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(data) + b"\n\n"


def error_body(error: RequestError, status: int | None = None) -> dict[str, Any]:
    """OpenAI's envelope."""
    status = status or error.status
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": str(error.code)}}


def usage(relays: Sequence[OutputStream]) -> dict[str, Any]:
    """OpenAI's ``usage``, over all outputs of a request: a prompt counts once, whatever the number of its samples."""
    prompts: dict[int, tuple[int, int]] = {}
    for relay in relays:
        number, cached = relay.ask.prompt_number, relay.cached_tokens
        known = prompts.get(number)  # the sample that came first computed what its siblings found cached
        prompts[number] = (len(relay.ask.prompt), cached if known is None else min(known[1], cached))
    prompt = sum(length for length, _ in prompts.values())
    completion = sum(len(relay.ids) for relay in relays)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in prompts.values())},
    }


def judged_prompt(relay: OutputStream) -> list[tuple[int, TokenLogprobs | None]]:
    """The prompt's tokens from where the client wants them, with what the nodes said; nothing about the first."""
    first = relay.ask.judged_from
    if first is None:
        return []
    return list(zip(relay.ask.prompt[first:], chain([None], relay.prompt_logprobs, repeat(None)), strict=False))


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


class _OpenAIRender:
    """Shared by both OpenAI endpoints.

    Args:
        head: the answer's id, the moment of creation and the model's name.
        usage: token counts in a stream.
    """

    kind = ""
    chunk_kind = ""

    def __init__(
        self, text: Text, head: dict[str, Any], *, with_logprobs: bool, with_ids: bool, usage: Usage = ""
    ) -> None:
        self._text = text
        self._head = head
        self._usage = usage
        self._with_logprobs = with_logprobs
        self._with_ids = with_ids
        self._is_plain = not with_logprobs and not with_ids
        self._offsets: dict[int, int] = {}
        self._prefixes: dict[int, bytes] = {}

    def first(self, relays: Sequence[OutputStream]) -> bytes:
        """What a stream begins with."""
        return b""

    def chunk(self, relay: OutputStream, delta: Delta) -> bytes:
        """One stream chunk; empty if there's nothing to show yet."""
        is_echo = delta.first == 0 and bool(relay.ask.echo)
        if not delta.text and not delta.is_last and not is_echo and (self._is_plain or not delta.ids):
            return b""
        if self._is_plain and not delta.is_last and not is_echo and not self._usage:
            return self._plain_chunk(relay.number, delta.text)
        choice = self._chunk_choice(relay, delta)
        chunk = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        if self._usage:
            chunk["usage"] = usage([relay]) if self._usage == "each" else None
        return event(chunk)

    def last(self, relays: Sequence[OutputStream]) -> bytes:
        """What a stream ends with."""
        if not self._usage:
            return DONE
        return event({**self._head, "object": self.chunk_kind, "choices": [], "usage": usage(relays)}) + DONE

    def answer(self, relays: Sequence[OutputStream]) -> dict[str, Any]:
        """The whole answer at once."""
        choices = [self._choice(relay) for relay in relays]
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage(relays)}

    def _plain_chunk(self, number: int, text: str) -> bytes:
        prefix = self._prefixes.get(number)
        if prefix is None:
            head = encode_json({**self._head, "object": self.chunk_kind})
            prefix = self._prefixes[number] = b"data: " + head[:-1] + self._plain_middle(number)
        return prefix + encode_json(text) + self._plain_end

    _plain_end = b""

    def _plain_middle(self, number: int) -> bytes:
        raise NotImplementedError

    def _chunk_choice(self, relay: OutputStream, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, relay: OutputStream) -> dict[str, Any]:
        raise NotImplementedError

    def _finish(
        self, relay: OutputStream, choice: dict[str, Any], ids: Iterable[int], is_last: bool = True
    ) -> dict[str, Any]:
        choice["finish_reason"] = relay.finish if is_last else None
        if is_last:
            choice["stop_reason"] = relay.matched
        if self._with_ids:
            choice["token_ids"] = list(ids)
        return choice


class CompletionRender(_OpenAIRender):
    """``text_completion``."""

    kind = chunk_kind = "text_completion"
    _plain_end = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def _plain_middle(self, number: int) -> bytes:
        return b',"choices":[{"index":%d,"text":' % number

    def _chunk_choice(self, relay: OutputStream, delta: Delta) -> dict[str, Any]:
        text = relay.ask.echo + delta.text if delta.first == 0 else delta.text
        choice = {"index": relay.number, "text": text, "logprobs": self._logprobs(relay, delta)}
        return self._finish(relay, choice, delta.ids, delta.is_last)

    def _choice(self, relay: OutputStream) -> dict[str, Any]:
        return self._chunk_choice(relay, Delta(relay.text, 0, relay.ids, relay.logprobs, is_last=True))

    def _logprobs(self, relay: OutputStream, delta: Delta) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        judged = list(zip(delta.ids, delta.logprobs, strict=False))
        if delta.first == 0:
            judged = judged_prompt(relay) + judged
        offset = self._offsets.get(relay.number, 0)
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, entry in judged:
            shown = self._text.piece(token).decode(errors="replace")
            tokens.append(shown)
            offsets.append(offset)
            offset += len(shown)
            values.append(None if entry is None else finite(entry.token))
            tops.append(None if entry is None else self._tops(shown, entry))
        self._offsets[relay.number] = offset
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}

    def _tops(self, shown: str, entry: TokenLogprobs) -> dict[str, float]:
        tops: dict[str, float] = {}
        for token, logprob in entry.top:
            tops.setdefault(self._text.piece(token).decode(errors="replace"), finite(logprob))
        tops.setdefault(shown, finite(entry.token))
        return tops


class ChatRender(_OpenAIRender):
    """``chat.completion`` and its chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    _plain_end = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def first(self, relays: Sequence[OutputStream]) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": relay.number, "delta": delta, "logprobs": None, "finish_reason": None} for relay in relays]
        return event({**self._head, "object": self.chunk_kind, "choices": choices})

    def _plain_middle(self, number: int) -> bytes:
        return b',"choices":[{"index":%d,"delta":{"content":' % number

    def _chunk_choice(self, relay: OutputStream, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        logprobs = self._logprobs(delta.ids, delta.logprobs)
        choice = {"index": relay.number, "delta": content, "logprobs": logprobs}
        return self._finish(relay, choice, delta.ids, delta.is_last)

    def _choice(self, relay: OutputStream) -> dict[str, Any]:
        message = {"role": "assistant", "content": relay.text, "refusal": None}
        logprobs = self._logprobs(relay.ids, relay.logprobs)
        return self._finish(relay, {"index": relay.number, "message": message, "logprobs": logprobs}, relay.ids)

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
        piece = self._text.piece(token)
        return {"token": piece.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(piece)}


class NativeRender:
    """Answers and stream events of ``/generate``.

    Args:
        is_incremental: stream events carry what is new instead of everything so far.
        with_text: log-probabilities name each token's text.
    """

    def __init__(
        self, text: Text, *, with_logprobs: bool, with_text: bool, is_batch: bool, is_incremental: bool
    ) -> None:
        self._text = text
        self._with_logprobs = with_logprobs
        self._with_text = with_text
        self._is_batch = is_batch
        self._is_incremental = is_incremental

    def first(self, relays: Sequence[OutputStream]) -> bytes:
        return b""

    def chunk(self, relay: OutputStream, delta: Delta) -> bytes:
        first, text, ids = (delta.first, delta.text, delta.ids) if self._is_incremental else (0, relay.text, relay.ids)
        body: dict[str, Any] = {"text": text, "output_ids": ids, "meta_info": self._meta(relay, first)}
        if self._is_batch:
            body["index"] = relay.number
        return event(body)

    def last(self, relays: Sequence[OutputStream]) -> bytes:
        return DONE

    def answer(self, relays: Sequence[OutputStream]) -> Any:
        answers = [{"text": relay.text, "output_ids": relay.ids, "meta_info": self._meta(relay, 0)} for relay in relays]
        return answers if self._is_batch else answers[0]

    def _meta(self, relay: OutputStream, first: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": relay.ask.rid,
            "finish_reason": finish_reason(relay),
            "prompt_tokens": len(relay.ask.prompt),
            "completion_tokens": len(relay.ids),
            "cached_tokens": relay.cached_tokens,
        }
        if self._with_logprobs:
            entries = list(zip(relay.ids[first:], relay.logprobs[first:], strict=False))
            meta["output_token_logprobs"] = [self._entry(token, entry) for token, entry in entries if entry is not None]
            meta["output_top_logprobs"] = [self._tops(entry) for _, entry in entries if entry is not None]
            if first == 0:
                prompt = judged_prompt(relay)
                meta["input_token_logprobs"] = [self._entry(token, entry) for token, entry in prompt]
                meta["input_top_logprobs"] = [None if entry is None else self._tops(entry) for _, entry in prompt]
        if relay.is_ended:
            meta["e2e_latency"] = relay.ended_at - relay.started_at
            meta["time_to_first_token"] = max(relay.first_at - relay.started_at, 0.0)
            meta["timings"] = relay.timings
        return meta

    def _entry(self, token: int, entry: TokenLogprobs | None) -> tuple[float | None, int, str | None]:
        return (None if entry is None else finite(entry.token), token, self._shown(token))

    def _tops(self, entry: TokenLogprobs) -> list[tuple[float, int, str | None]]:
        return [(finite(logprob), token, self._shown(token)) for token, logprob in entry.top]

    def _shown(self, token: int) -> str | None:
        return self._text.piece(token).decode(errors="replace") if self._with_text else None


def finish_reason(relay: OutputStream) -> dict[str, Any] | None:
    """SGLang's object; None while the output goes on."""
    if relay.finish == "stop":
        return {"type": "stop", "matched": relay.matched}
    if relay.finish == "length":
        return {"type": "length", "length": len(relay.ids)}
    return None


def as_error(error: BaseException) -> RequestError:
    """Any failure as a named one; what is unforeseen is ours."""
    if isinstance(error, RequestError):
        return error
    return RequestError(ErrorCode.INTERNAL, "the gateway failed on this request; its log says more")
