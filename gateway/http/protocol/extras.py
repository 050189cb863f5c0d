"""Fields that bodies do not declare although clients send them: those without effect, and those refused by name.

Declared fields have an effect. Any other field of a body is unknown and refused, unless it is listed here.
"""

#: Accepted and ignored, since the answer is right without them. ``decode_with_extras`` names those that a body has.
WITHOUT_EFFECT = frozenset(
    {
        # OpenAI
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention", "moderation",
        "prompt_cache_options", "verbosity", "prediction", "max_tool_calls",
        "access_programs", "background_options", "image", "personality",
        "client_metadata",  # of Codex
        # Anthropic
        "billing_policy", "cache_control", "context_management", "diagnostics", "fallback_credit_token",
        "inference_geo", "speed", "user_profile_id", "workspace_id",
        # vLLM
        "guided_decoding_backend", "session_id", "media_io_kwargs", "mm_processor_kwargs",
        # SGLang
        "log_metrics", "task", "return_cached_tokens_details", "use_audio_in_video", "max_dynamic_patch",
        "min_dynamic_patch", "images_config", "ngram_corpus_id", "custom_labels",
    }
)  # fmt: skip

#: Refused by name, unless the value is null or one of these, which ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # OpenAI
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "background": (False,),
    "best_of": (1,),
    # Anthropic
    "container": (),
    "mcp_servers": ([],),
    "thread": (),
    "compaction": (),
    "fallbacks": ([],),
    # vLLM
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "echo": (False,),
    "spaces_between_special_tokens": (True, False),  # a choice of slow tokenizers, which are not used here
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "prompt_embeds": (),
    "chat_template": (),
    "guided_whitespace_pattern": (),
    "whitespace_pattern": (),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "logits_processors": (),
    "vllm_xargs": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_token_strs": (False,),
    "repetition_detection": (),
    "watermarking": (False,),
    "request_id": (),
    # SGLang
    "stop_regex": ([], ""),
    "stream_interval": (1,),
    "stream_reasoning": (True,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_prompt_token_ids": (False,),
    "return_meta_info": (False,),
    "token_ids_logprob": (),
    "lora_path": (),
    "input_embeds": (),
    "image_data": ([],),
    "audio_data": ([],),
    "video_data": ([],),
    "session_params": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "extra_key": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "data_parallel_rank": (),
    "routed_dp_rank": (),
    "disagg_prefill_dp_rank": (),
}

#: What to send instead of a field that is refused.
INSTEAD = {
    "functions": "use tools",
    "function_call": "use tools, tool_choice and, in messages, tool_calls",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "thread": "send the whole conversation",
    "extra_key": "use cache_salt",
    "return_prompt_token_ids": "use return_token_ids",
    "request_id": "send the header x-request-id",
    "rid": "/abort_request takes the id of the answer",
    "lora_path": "name the adapter as model",
    "chat_template": "start the gateway with --chat-template",
    "enable_thinking": "put it into chat_template_kwargs, or use reasoning_effort",
    "images": "only text is supported",
}

#: Names that the other APIs have for a field that is unknown in one: a hint at the first that the body declares.
OTHER_NAMES = {
    "messages": ("input", "prompt", "text"),
    "prompt": ("messages", "text"),
    "input": ("messages", "prompt", "text"),
    "text": ("messages", "prompt"),
    "system": ("instructions", "messages"),
    "instructions": ("system", "messages"),
    "max_new_tokens": ("max_tokens", "max_output_tokens", "sampling_params.max_new_tokens"),
    "max_output_tokens": ("max_tokens", "sampling_params.max_new_tokens"),
    "max_completion_tokens": ("max_output_tokens", "max_tokens", "sampling_params.max_new_tokens"),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop", "sampling_params.stop"),
    "response_format": ("text.format", "output_config.format", "sampling_params.json_schema"),
    "reasoning_effort": ("reasoning.effort", "output_config.effort"),
    "reasoning": ("reasoning_effort", "output_config.effort"),
    "thinking": ("reasoning.effort",),
    "parallel_tool_calls": ("tool_choice.disable_parallel_tool_use",),
}
