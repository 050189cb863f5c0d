"""Makes the bodies of requests: tokens or words from the seed and segment keys, and the JSON around them.

A counter-based generator keyed with (seed, segment key) draws the tokens, so a segment has the same tokens in every
process, and a shorter segment of the same key is a prefix of a longer one. Encoded segments are cached.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from scripts.load_tester.workload.planned_request import ANSWER, PlannedRequest, Segment

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
    def encode(self, text: str) -> Any: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass
class RequestBodies:
    """Makes bodies.

    Args:
        vocab: token ids are drawn from ``low <= id < high``.
        model: name of the model; None to leave it out.
        is_text: send words instead of token ids; always so for chat.
        tokenizer: trims words to the exact number of tokens; without it, one word stands for one token.
        tenant_in_header: the tenant is named by header or key, and left out of the body.
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
        self._kept: OrderedDict[Segment, bytes] = OrderedDict()
        self._num_kept = 0
        self.is_text = self.is_text or self.endpoint == "chat"
        bits = np.random.Philox(key=np.array([self.seed, 0], dtype=np.uint64))
        self._bits, self._unused = bits, bits.state
        self._integers = np.random.Generator(bits).integers

    def tokens(self, segment: Segment) -> list[int]:
        return self._drawn(segment, *self.vocab)

    def _drawn(self, segment: Segment, low: int, high: int) -> list[int]:
        """One number, low <= n < high, for each token of the segment, from the segment's own random stream."""
        self._unused["state"]["key"][1] = segment[0]
        self._bits.state = self._unused  # a new generator would ask the system for a seed first
        numbers: list[int] = self._integers(low, high, segment[1], dtype=np.int64).tolist()
        return numbers

    def text(self, segment: Segment) -> str:
        """Words of a segment, each followed by a space, so that segments can be joined."""
        words = [WORDS[number] for number in self._drawn(segment, 0, len(WORDS))]
        if self.tokenizer is None:
            return " ".join(words) + " "
        ids = self.tokenizer.encode(" ".join(words)).ids[: segment[1]]
        return self.tokenizer.decode(ids) + " "

    def body(self, planned: PlannedRequest) -> bytes:
        fields = self._fields(planned)
        if planned.extra:
            fields.update(planned.extra)
        if self.endpoint == "chat":
            fields.setdefault("messages", self._messages(planned))
            return _encode(fields)
        if "prompt" in fields and self.endpoint == "generate":
            prompt = fields.pop("prompt")
            fields["text" if isinstance(prompt, str) else "input_ids"] = prompt
        if {"prompt", "text", "input_ids"} & fields.keys():
            return _encode(fields)
        if self.is_text:
            name, prompt_json = "text", _encode("".join(map(self.text, planned.segments)).removesuffix(" "))
        else:
            name, prompt_json = "input_ids", b"[%b]" % b",".join(map(self._encoded, planned.segments))
        if self.endpoint == "completions":
            name = "prompt"
        return b"%b,%b:%b}" % (_encode(fields)[:-1], _encode(name), prompt_json)

    def _fields(self, planned: PlannedRequest) -> dict[str, Any]:
        if self.endpoint == "generate":
            sampling: dict[str, Any] = {"max_new_tokens": planned.num_output, "temperature": 0}
            if self.ignores_eos:
                sampling["ignore_eos"] = True
            fields: dict[str, Any] = {"sampling_params": sampling, "stream": self.is_stream}
        else:
            fields = {"max_tokens": planned.num_output, "temperature": 0, "stream": self.is_stream}
            if self.is_stream:
                fields["stream_options"] = {"include_usage": True}
            if self.ignores_eos:
                fields["ignore_eos"] = True
            if self.with_ids:
                fields["return_token_ids"] = True
            if planned.tenant and not self.tenant_in_header:
                fields["user"] = planned.tenant
        if self.model:
            fields["model"] = self.model
        if planned.priority is not None:
            fields["priority"] = planned.priority
        if planned.priority_class:
            fields["priority_class"] = planned.priority_class
        if planned.deadline_ms is not None:
            fields["deadline_ms"] = planned.deadline_ms
        fields.update(self.common)
        return fields

    def _messages(self, planned: PlannedRequest) -> list[dict[str, str]]:
        """Segments as messages of a conversation; earlier responses are the assistant's."""
        messages: list[dict[str, str]] = []
        for segment in planned.segments:
            role = "assistant" if segment[0] >> 56 == ANSWER else "user"
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += self.text(segment)
            else:
                messages.append({"role": role, "content": self.text(segment)})
        for message in messages:  # a trailing space would be one more token
            message["content"] = message["content"].removesuffix(" ")
        return messages

    def _encoded(self, segment: Segment) -> bytes:
        """Token ids of a segment as JSON without brackets."""
        kept = self._kept.get(segment)
        if kept is not None:
            self._kept.move_to_end(segment)
            return kept
        made = _encode(self.tokens(segment))[1:-1]
        self._kept[segment] = made
        self._num_kept += len(made)
        while self._num_kept > MAX_KEPT_BYTES:
            _, dropped = self._kept.popitem(last=False)
            self._num_kept -= len(dropped)
        return made
