"""Bodies of requests: tokens or words out of seed and key, and the JSON around them.

Token ids are drawn by a counter-based generator keyed with (seed, piece), so that a piece has the same tokens whoever
makes it; a shorter piece of the same key is a prefix of a longer one. Encoded pieces that come again are kept.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from scripts.load_tester.workload.plan import Piece, Planned

Endpoint = Literal["completions", "chat", "generate"]
PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
MAX_KEPT_BYTES = 64 << 20
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body"
).split()

_encode = msgspec.json.Encoder().encode


class Tokenizer(Protocol):
    """What is asked of a tokenizer: text to ids, and back."""

    def encode(self, text: str) -> Any: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass
class Prompts:
    """Makes bodies.

    Args:
        seed: of the run.
        vocab: token ids are drawn from ``low <= id < high``.
        endpoint: whose dialect.
        model: name of the model; None to leave it out.
        is_text: send words instead of token ids (chat always does).
        tokenizer: with it, words are trimmed to the exact number of tokens; without, one word stands for one token.
        common: fields that every body gets.
        tenant_in_header: or in the key; so not in the body.
    """

    seed: int
    vocab: tuple[int, int]
    endpoint: Endpoint
    model: str | None = None
    is_text: bool = False
    tokenizer: Tokenizer | None = None
    is_stream: bool = True
    ignores_eos: bool = True
    with_ids: bool = False
    common: dict[str, Any] = field(default_factory=dict)
    tenant_in_header: bool = False

    def __post_init__(self) -> None:
        self._kept: OrderedDict[Piece, bytes] = OrderedDict()
        self._num_kept = 0
        self.is_text = self.is_text or self.endpoint == "chat"
        bits = np.random.Philox(key=np.array([self.seed, 0], dtype=np.uint64))
        self._bits, self._unused = bits, bits.state
        self._integers = np.random.Generator(bits).integers

    def tokens(self, piece: Piece) -> list[int]:
        """The token ids of a piece."""
        return self._drawn(piece, *self.vocab)

    def _drawn(self, piece: Piece, low: int, high: int) -> list[int]:
        """As many numbers, low <= n < high, as the piece has tokens, from the beginning of a stream of its own."""
        self._unused["state"]["key"][1] = piece[0]
        self._bits.state = self._unused  # a new generator would first ask the system for a seed, to no purpose
        numbers: list[int] = self._integers(low, high, piece[1], dtype=np.int64).tolist()
        return numbers

    def text(self, piece: Piece) -> str:
        """The words of a piece, each with a space after it, so that pieces can be put together."""
        words = [WORDS[number] for number in self._drawn(piece, 0, len(WORDS))]
        if self.tokenizer is None:
            return " ".join(words) + " "
        ids = self.tokenizer.encode(" ".join(words)).ids[: piece[1]]
        return self.tokenizer.decode(ids) + " "

    def body(self, planned: Planned) -> bytes:
        """The JSON body of a request."""
        fields = self._fields(planned)
        if planned.extra:
            fields.update(planned.extra)
        if self.endpoint == "chat":
            fields.setdefault("messages", self._messages(planned))
            return _encode(fields)
        name = "input_ids" if self.endpoint == "generate" else "prompt"
        if self.is_text:
            name = "text" if self.endpoint == "generate" else "prompt"
        if "prompt" in fields and self.endpoint == "generate":
            prompt = fields.pop("prompt")
            fields["text" if isinstance(prompt, str) else "input_ids"] = prompt
        if {"prompt", "text", "input_ids"} & fields.keys():
            return _encode(fields)
        prompt_json = b",".join(map(self._encoded, planned.pieces))
        if self.is_text:
            prompt_json = _encode("".join(map(self.text, planned.pieces)).removesuffix(" "))
        else:
            prompt_json = b"[" + prompt_json + b"]"
        return b"%b,%b:%b}" % (_encode(fields)[:-1], _encode(name), prompt_json)

    def _fields(self, planned: Planned) -> dict[str, Any]:
        if self.endpoint == "generate":
            sampling: dict[str, Any] = {"max_new_tokens": planned.num_output, "temperature": 0}
            if self.ignores_eos:
                sampling["ignore_eos"] = True
            fields: dict[str, Any] = {"sampling_params": sampling, "stream": self.is_stream}
        else:
            fields = {"max_tokens": planned.num_output, "temperature": 0, "stream": self.is_stream}
            if self.model:
                fields["model"] = self.model
            if self.is_stream:
                fields["stream_options"] = {"include_usage": True}
            if self.ignores_eos:
                fields["ignore_eos"] = True
            if self.with_ids:
                fields["return_token_ids"] = True
            if planned.tenant and not self.tenant_in_header:
                fields["user"] = planned.tenant
        if planned.priority is not None:
            fields["priority"] = planned.priority
        if planned.priority_class:
            fields["priority_class"] = planned.priority_class
        if planned.deadline_ms is not None:
            fields["deadline_ms"] = planned.deadline_ms
        fields.update(self.common)
        return fields

    def _messages(self, planned: Planned) -> list[dict[str, str]]:
        """Pieces as turns of a conversation; answers, by their kind, as the assistant's."""
        from scripts.load_tester.workload.plan import ANSWER

        messages: list[dict[str, str]] = []
        for piece in planned.pieces:
            role = "assistant" if piece[0] >> 56 == ANSWER else "user"
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += self.text(piece)
            else:
                messages.append({"role": role, "content": self.text(piece)})
        for message in messages:  # a space at the end would be a token more
            message["content"] = message["content"].removesuffix(" ")
        return messages

    def _encoded(self, piece: Piece) -> bytes:
        """A piece's ids as JSON without brackets."""
        if self.is_text:
            return b""
        kept = self._kept.get(piece)
        if kept is not None:
            self._kept.move_to_end(piece)
            return kept
        made = _encode(self.tokens(piece))[1:-1]
        self._kept[piece] = made
        self._num_kept += len(made)
        while self._num_kept > MAX_KEPT_BYTES:
            _, dropped = self._kept.popitem(last=False)
            self._num_kept -= len(dropped)
        return made
