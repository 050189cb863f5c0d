"""Example bodies in the API's description, which tools that read it send first."""

from typing import Any

import msgspec

from gateway.http.protocol import anthropic, native, openai, responses

MESSAGES = [{"role": "user", "content": "Hello"}]
#: A body that is answered with 200 while a model is ready, or changes nothing.
EXAMPLES: dict[type[msgspec.Struct], dict[str, Any]] = {
    openai.ChatCompletionRequest: {"messages": MESSAGES, "max_tokens": 32},
    openai.CompletionRequest: {"prompt": "Once upon a time", "max_tokens": 32},
    responses.ResponsesRequest: {"input": "Hello", "max_output_tokens": 32},
    anthropic.MessagesRequest: {"messages": MESSAGES, "max_tokens": 32},
    anthropic.CountTokensRequest: {"messages": MESSAGES},
    native.NativeRequest: {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 32}},
    native.TokenizeRequest: {"prompt": "Hello"},
    native.DetokenizeRequest: {"tokens": [72, 105]},
    native.AbortRequest: {"rid": "my-request"},
    native.PriorityChange: {"priority": 1},
    native.ProfileRequest: {"num_steps": 10},
    native.DrainRequest: {"timeout_s": 30},
    native.RoleChange: {"role": "prefill"},
    native.LoadLoraRequest: {"lora_name": "my-adapter", "lora_path": "my-adapter"},
    native.UnloadLoraRequest: {"lora_name": "my-adapter"},
}


def json_body(kind: type[msgspec.Struct], schema: Any, *, is_required: bool = True) -> dict[str, Any]:
    """The description of a JSON body."""
    content = {"schema": schema, "example": EXAMPLES[kind]}
    return {"required": is_required, "content": {"application/json": content}}
