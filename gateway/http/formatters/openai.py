"""Formats answers and stream chunks of OpenAI's completions and chat completions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    token_logprobs,
    token_text,
)
from gateway.http.protocol.openai import ChatCompletionRequest, CompletionRequest, StreamOptions
from gateway.requests.output_processor import Delta, OutputStream
from gateway.text.detokenizer import Detokenizer
from gateway.text.output_parser import OutputPiece, ReasoningPiece, TextPiece, ToolCallBegin, joined
from gateway.workers.served_models import ServedModel

NO_OPTIONS = StreamOptions()
#: Stands for the text in the chunk that ``_bytes_around_text`` cuts in two. It is not part of what follows the text.
MARK = "\0"


def usage(outputs: Sequence[OutputStream]) -> dict[str, Any]:
    """OpenAI's ``usage`` over all outputs of a request; each prompt counts once, however many samples it has."""
    cached: dict[int, int] = {}  # by number of the prompt
    prompt = completion = num_reasoning = 0
    has_parts = False
    for output in outputs:
        request = output.request
        completion += len(output.ids)
        num_reasoning += output.num_reasoning_tokens
        has_parts |= request.output_format is not None
        known = cached.get(request.prompt_number)
        if known is None:
            prompt += len(request.prompt)
            known = output.cached_tokens
        # The first sample computed what the others found in the cache.
        cached[request.prompt_number] = min(known, output.cached_tokens)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }
    if has_parts:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return counts


class _OpenAIFormatter(ResponseFormatter):
    """Common part of both OpenAI endpoints."""

    kind = ""
    chunk_kind = ""

    def __init__(self, model: ServedModel, body: CompletionRequest | ChatCompletionRequest, request_id: str) -> None:
        self._tokenizer = model.tokenizer
        self._request_id = request_id
        self._model_name = model.asked_name
        options = body.stream_options or NO_OPTIONS
        self._with_usage = bool(options.include_usage)  # at the end of a stream ...
        self._with_usage_each = bool(options.continuous_usage_stats)  # ... and also in each chunk
        self._with_logprobs = body.logprobs is not None and body.logprobs is not False
        self._with_ids = bool(body.return_token_ids)
        self._shows_ids = bool(body.return_tokens_as_token_ids)  # instead of the texts of tokens
        self._is_plain = not (self._with_usage_each or self._with_logprobs or self._with_ids)
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # by number of the output

    def chunk(self, output: OutputStream, delta: Delta) -> bytes:
        around = self._around_text.get(output.number)
        if around is not None and not delta.is_last:  # the usual case, kept short
            return encode_json(delta.text).join(around) if delta.text else b""
        if self._is_plain and delta.first and not delta.is_last and output.request.output_format is None:
            self._around_text[output.number] = self._bytes_around_text(output)
            return self.chunk(output, delta)
        has_details = bool(delta.ids) and (self._with_logprobs or self._with_ids)
        if not (delta.is_last or has_details or self._has_content(output, delta)):
            return b""
        return self._chunk([self._chunk_choice(output, delta)], [output])

    def _bytes_around_text(self, output: OutputStream) -> tuple[bytes, bytes]:
        """What precedes and follows the text of a chunk that shows text alone, which is equal in all of them."""
        chunk = self._chunk([self._chunk_choice(output, Delta(MARK, 1, [], [], is_last=False))], [output])
        before, _, after = chunk.rpartition(encode_json(MARK))
        return before, after

    def last(self, outputs: Sequence[OutputStream]) -> bytes:
        if not self._with_usage:
            return DONE
        return sse_event({**self._head(outputs, self.chunk_kind), "choices": [], "usage": usage(outputs)}) + DONE

    def _chunk(self, choices: list[dict[str, Any]], outputs: Sequence[OutputStream], **fields: Any) -> bytes:
        chunk = {**self._head(outputs, self.chunk_kind), **fields, "choices": choices}
        if self._with_usage:
            chunk["usage"] = usage(outputs) if self._with_usage_each else None
        return sse_event(chunk)

    def answer(self, outputs: Sequence[OutputStream]) -> Iterator[bytes]:
        head = {**self._head(outputs, self.kind), **self._prompt_ids(outputs)}
        yield encode_json(head).removesuffix(b"}") + b',"choices":'
        yield from json_list(map(self._choice, outputs))
        yield b',"usage":%b}' % encode_json(usage(outputs))

    def _head(self, outputs: Sequence[OutputStream], kind: str) -> dict[str, Any]:
        """The fields that begin an answer or a chunk."""
        return {"id": self._request_id, "object": kind, "created": outputs[0].created, "model": self._model_name}

    def _prompt_ids(self, outputs: Sequence[OutputStream]) -> dict[str, Any]:
        """The prompt, beside the choices, if the client wants token ids; completions have several prompts."""
        return {}

    def _has_content(self, output: OutputStream, delta: Delta) -> bool:
        """Whether a delta shows something of the answer."""
        raise NotImplementedError

    def _chunk_choice(self, output: OutputStream, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, output: OutputStream) -> dict[str, Any]:
        raise NotImplementedError

    def _token_text(self, token: int) -> str:
        return f"token_id:{token}" if self._shows_ids else token_text(self._tokenizer.piece(token))

    def _finish(
        self, output: OutputStream, choice: dict[str, Any], ids: Iterable[int], is_last: bool = True
    ) -> dict[str, Any]:
        choice["finish_reason"] = output.finish if is_last else None
        if is_last:
            choice["stop_reason"] = _stop_reason(output)
        if self._with_ids:
            choice["token_ids"] = list(ids)
        return choice


def _stop_reason(output: OutputStream) -> int | str | None:
    """vLLM's field: the stop string or the token of ``stop_token_ids`` that ended the output; not the model's own."""
    is_asked = isinstance(output.matched, str) or output.matched in output.request.sampling.stop_token_ids
    return output.matched if is_asked else None


@dataclass(slots=True)
class _TextOffset:
    """Position in a text, in characters: where the next token's text begins.

    A token within a character has the position of this character. Tokens that the text leaves out have no characters.
    """

    detokenizer: Detokenizer
    offset: int

    def advance(self, token: int) -> int:
        """The position of this token, which comes next."""
        offset = self.offset
        self.offset += len(self.detokenizer.push((token,)))
        return offset


class CompletionFormatter(_OpenAIFormatter):
    """``text_completion``."""

    kind = chunk_kind = "text_completion"

    def __init__(self, model: ServedModel, body: CompletionRequest, request_id: str) -> None:
        super().__init__(model, body, request_id)
        self._offsets: dict[int, _TextOffset] = {}

    def _has_content(self, output: OutputStream, delta: Delta) -> bool:
        return bool(delta.text) or (delta.first == 0 and bool(output.request.echo))

    def _chunk_choice(self, output: OutputStream, delta: Delta) -> dict[str, Any]:
        text = output.request.echo + delta.text if delta.first == 0 else delta.text
        choice = {"index": output.number, "text": text, "logprobs": self._logprobs(output, delta)}
        if self._with_ids and delta.first == 0:
            choice["prompt_token_ids"] = output.request.prompt
        return self._finish(output, choice, delta.ids, delta.is_last)

    def _choice(self, output: OutputStream) -> dict[str, Any]:
        return self._chunk_choice(output, Delta(output.text, 0, output.ids, output.logprobs, is_last=True))

    def _logprobs(self, output: OutputStream, delta: Delta) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        packed: list[tuple[int, PackedLogprobs | None]] = []
        offsets: list[int] = []
        if delta.first == 0:
            packed += prompt_logprob_entries(output)
            offsets += self._prompt_offsets(output, [token for token, _ in packed])
            request = output.request
            self._offsets[output.number] = self._text_offset(output, request.text_offset, request.text_before)
        position = self._offsets[output.number]
        offsets += [position.advance(token) for token in delta.ids]
        packed += zip(delta.ids, delta.logprobs, strict=False)
        values: list[float | None] = []
        tops: list[msgspec.Raw | None] = []
        with prompt_logprobs_of(output):
            for token, one in packed:
                entry = None if one is None else unpack_logprobs(one)
                values.append(None if entry is None else finite(entry.token))
                tops.append(None if entry is None else as_json(self._tops(token, entry)))
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": [self._token_text(token) for token, _ in packed],
            "top_logprobs": tops,
        }

    def _text_offset(self, output: OutputStream, offset: int, before: Sequence[int] = ()) -> _TextOffset:
        return _TextOffset(self._tokenizer.detokenizer(before, skip_special=output.request.skip_special), offset)

    def _prompt_offsets(self, output: OutputStream, prompt: Sequence[int]) -> list[int]:
        """Positions of a prompt's tokens; a special one has characters if the client has written it as text."""
        echo, position = output.request.echo, self._text_offset(output, 0)
        offsets = []
        for token in prompt:
            offset = position.advance(token)
            offsets.append(min(offset, len(echo)))
            if position.offset == offset and token in self._tokenizer.special_ids:
                written = self._tokenizer.piece(token).decode(errors="ignore").strip()
                position.offset += len(written) if echo.startswith(written, offset) else 0
        return offsets

    def _tops(self, sampled: int, entry: TokenLogprobs) -> dict[str, float]:
        """Log-probabilities by the texts of tokens. Of two tokens with one text, the less likely is shown by its id."""
        tops: dict[str, float] = {}
        logprobs = dict(entry.top)
        logprobs.setdefault(sampled, entry.token)
        for token, logprob in logprobs.items():
            text = self._token_text(token)
            tops[f"token_id:{token}" if text in tops else text] = finite(logprob)
        return tops


class ChatFormatter(_OpenAIFormatter):
    """``chat.completion`` and its chunks.

    An answer with an output format is shown by its pieces: ``reasoning_content``, ``content`` and ``tool_calls``.
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, model: ServedModel, body: ChatCompletionRequest, request_id: str) -> None:
        super().__init__(model, body, request_id)
        self._shows_reasoning = body.include_reasoning is not False
        self._key = request_id.removeprefix("chatcmpl-")[:24]  # OpenAI's servers take ids of calls up to 40 characters

    def first(self, outputs: Sequence[OutputStream]) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choices: list[dict[str, Any]] = [
            {"index": output.number, "delta": delta, "logprobs": None, "finish_reason": None} for output in outputs
        ]
        return self._chunk(choices, outputs, **self._prompt_ids(outputs))

    def _prompt_ids(self, outputs: Sequence[OutputStream]) -> dict[str, Any]:
        return {"prompt_token_ids": outputs[0].request.prompt} if self._with_ids else {}

    def _has_content(self, output: OutputStream, delta: Delta) -> bool:
        return bool(delta.text if output.request.output_format is None else self._shown(delta.pieces))

    def _chunk_choice(self, output: OutputStream, delta: Delta) -> dict[str, Any]:
        if output.request.output_format is None:
            content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        else:
            content = self._content(output, delta.pieces)
        logprobs = self._logprobs(delta.ids, delta.logprobs)
        choice = {"index": output.number, "delta": content, "logprobs": logprobs}
        return self._finish(output, choice, delta.ids, delta.is_last)

    def _choice(self, output: OutputStream) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        if output.request.output_format is not None:
            content = self._content(output, output.pieces)
            for call in content.get("tool_calls", ()):
                del call["index"]
            message |= {"content": None if "tool_calls" in content else "", **content}
        logprobs = self._logprobs(output.ids, output.logprobs)
        return self._finish(output, {"index": output.number, "message": message, "logprobs": logprobs}, output.ids)

    def _finish(
        self, output: OutputStream, choice: dict[str, Any], ids: Iterable[int], is_last: bool = True
    ) -> dict[str, Any]:
        choice = super()._finish(output, choice, ids, is_last)
        if choice["finish_reason"] == "stop" and any(isinstance(piece, ToolCallBegin) for piece in output.pieces):
            choice["finish_reason"] = "tool_calls"
        return choice

    def _shown(self, pieces: Sequence[OutputPiece]) -> list[OutputPiece]:
        """The pieces that the client wants."""
        if self._shows_reasoning:
            return list(pieces)
        return [piece for piece in pieces if not isinstance(piece, ReasoningPiece)]

    def _content(self, output: OutputStream, pieces: Sequence[OutputPiece]) -> dict[str, Any]:
        """Pieces as fields of a message or of a delta."""
        content: dict[str, list[str]] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in joined(self._shown(pieces)):
            if isinstance(piece, ReasoningPiece):
                content.setdefault("reasoning_content", []).append(piece.text)
            elif isinstance(piece, TextPiece):
                content.setdefault("content", []).append(piece.text)
            elif isinstance(piece, ToolCallBegin):
                calls[piece.index] = self._new_call(output, piece)
            else:
                call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        fields: dict[str, Any] = {name: "".join(texts) for name, texts in content.items()}
        return {**fields, "tool_calls": list(calls.values())} if calls else fields

    def _new_call(self, output: OutputStream, piece: ToolCallBegin) -> dict[str, Any]:
        return {
            "index": piece.index,
            "id": f"call_{self._key}{output.number:03d}{piece.index:02d}",
            "type": "function",
            "function": {"name": piece.name, "arguments": ""},
        }

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[PackedLogprobs]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        entries = zip(ids, logprobs, strict=False)
        content = [token_logprobs(packed, token, self._shown_token) for token, packed in entries]
        return {"content": content, "refusal": None}

    def _shown_token(self, token: int) -> dict[str, Any]:
        return {"token": self._token_text(token), "bytes": list(self._tokenizer.piece(token))}
