"""Types of the fields that several endpoints share, and the sampling fields.

Every field that has an effect is declared in this package; ``extras`` lists those that have none.
"""

from typing import Annotated, Any

from msgspec import Meta

from common.sampling_params import MAX_TOP_LOGPROBS
from gateway.http.protocol.decoding import Strict

#: Ends a pattern. ``$`` alone also matches before a last line break, and the patterns of JSON schemas have no ``\Z``.
END = r"(?!\n)$"
MAX_INT = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_SAMPLES = 128
MAX_BIASES = 300
MAX_BAD_WORDS = 128
MAX_ALLOWED_TOKENS = 65_536

Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StartLen = Annotated[int, Meta(ge=-1, le=MAX_INT)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Salt = Annotated[str, Meta(max_length=1024)]
Rid = Annotated[str, Meta(min_length=1, max_length=200)]
Priority = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
PriorityClass = Annotated[str, Meta(min_length=1, max_length=200)]
DeadlineMs = Annotated[float, Meta(gt=0, le=86_400_000)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
#: Describes a list that the translation of a body refuses when it is empty.
NotEmpty = Meta(extra_json_schema={"minItems": 1})
#: An object whose keys are token ids.
TokenKeys = Meta(extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}})
#: A field that is declared to be refused by name, unless it is null.
Refused = Annotated[Any, Meta(extra_json_schema={"type": "null"})]
Texts = str | list[str]
Prompts = str | list[str | int | list[int]]


def supports(*values: str) -> Meta:
    """Describe the values that a string may have; any other is refused with an error that says why."""
    return Meta(extra_json_schema={"enum": list(values)})


class SamplingFields(Strict, kw_only=True):
    """Sampling fields of all endpoints; None means the model's default."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    stop: Texts | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES), TokenKeys] | None = None
    # vLLM's and SGLang's names for one option: the stop string or token is shown.
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    bad_words: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None


class OpenAIFields(SamplingFields, kw_only=True):
    """Fields of all of OpenAI's endpoints."""

    model: str | None = None
    stream: bool | None = None
    # OpenAI's hint at prompts that begin alike. Requests are routed by the prefixes that nodes have cached, without it.
    prompt_cache_key: str | None = None
    # Baton's own fields, in all endpoints.
    priority: Priority | None = None
    priority_class: PriorityClass | None = None
    deadline_ms: DeadlineMs | None = None
    slo_ttft_ms: DeadlineMs | None = None
    slo_itl_ms: DeadlineMs | None = None
    cache_salt: Salt | None = None
