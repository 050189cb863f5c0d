"""The groups in which ``--help`` shows the options of each command, and the ten that it shows first.

Every option of a command is in exactly one group. A group may name options that a command does not have.
"""

from collections.abc import Iterable, Mapping, Sequence

Groups = Mapping[str, tuple[str, ...]]

SERVING: Groups = {
    "Processes": (
        "prefill", "decode", "workers", "ready_timeout", "drain_timeout", "name", "device", "tp", "threads",
        "attention_backend",
    ),
    "Model": (
        "model", "revision", "served_model_name", "also_serve", "weight_version", "dtype", "weight_dtype",
        "load_format", "context_length", "lora", "lora_dir", "max_loaded_loras", "max_lora_rank",
        "tokenizer", "model_impl", "trust_remote_code", "hf_overrides",
        "chat_template", "tool_call_parser", "reasoning_parser",
    ),
    "Requests and answers": (
        "request_timeout", "refuse_hopeless", "strict_fields", "max_body_bytes", "stream_interval",
        "incremental_streaming_output", "sse_ping_interval",
        "max_unread_tokens", "max_stored_responses", "max_stored_response_bytes", "stored_response_ttl",
        "idempotency_ttl", "max_idempotent_results", "max_idempotent_result_bytes", "retry_grace", "app_plugin",
    ),
    "Memory": (
        "memory_fraction", "max_total_tokens", "swa_full_tokens_ratio", "page_size", "kv_cache_dtype",
        "disable_radix_cache",
        "radix_eviction_policy", "num_reserved_decode_tokens", "retraction_policy",
        "resume_prefill_threshold",
    ),
    "Scheduling": (
        "schedule_policy", "max_running_requests", "max_queued_requests", "max_dispatch_ahead",
        "auto_roles", "auto_roles_per_hour",
        "local_prefill", "local_prefill_threshold",
        "chunked_prefill_size", "max_prefill_tokens", "enable_mixed_chunk",
        "long_prompt_share", "long_prefill_token_threshold", "max_long_partial_prefills",
        "enable_dynamic_chunking", "truncation_align_size", "disable_overlap_schedule", "cuda_graph_max_bs",
        "disable_cuda_graph", "max_skip_ahead", "schedule_seed",
    ),
    "Priorities and tenants": (
        "enable_priority_scheduling", "default_priority_value", "schedule_low_priority_values_first",
        "priority_scheduling_preemption_threshold", "preemption_cooldown", "max_preemptions",
        "priority_aging_per_second", "priority_function", "priority_classes", "default_priority_class",
        "tenant_shares", "tenant_quotas",
    ),
    "Network": (
        "host", "port", "group", "listen_fd", "control_host", "control_port", "advertise_control_host", "gateway",
        "gateway_file", "orphan_timeout", "etcd", "etcd_prefix", "etcd_ca", "etcd_cert", "etcd_cert_key",
        "advertise_host", "data_port", "data_interface",
        "http_host", "http_port", "health_timeout",
        "transport", "gpu_direct", "nixl_backend", "kv_checksum", "heartbeat_interval", "node_timeout",
        "recovery_timeout",
    ),
    "Security": (
        "keys", "api_key", "api_key_file", "admin_api_key", "tenant_header", "cluster_key", "insecure",
        "tls_cert", "tls_key", "allowed_hosts", "allowed_origins",
    ),
    "Observability": (
        "log_level", "log_format", "log_requests", "timeline_requests", "trace_sample_rate", "otlp_endpoint",
        "starvation_bound", "profile_dir", "record",
        "slo_ttft_ms", "slo_itl_ms", "advice_window", "advice_hold", "advice_utilization",
    ),
}  # fmt: skip

LOAD: Groups = {
    "Load": (
        "rate", "arrival", "cv", "burst_size", "concurrency", "num_requests", "duration", "warmup", "cooldown", "seed",
    ),
    "Prompts and outputs": (
        "input_len", "output_len", "prefix_len", "prefix_groups", "turns", "think", "tenants", "mix",
        "prompt", "tokenizer", "vocab_size", "ignore_eos", "return_token_ids",
    ),
    "Traces": (
        "trace", "trace_unit", "trace_window", "trace_jitter", "time_scale", "length_scale", "output_scale",
        "max_input_len", "max_output_len",
    ),
    "Objectives": ("slo_ttft", "slo_itl", "slo_tpot", "slo_e2e", "slo_attainment"),
}  # fmt: skip

LOADTEST: Groups = {
    "Server": (
        "url", "api_key", "model", "endpoint", "stream", "timeout", "header", "tenant_header", "tenant_keys",
        "extra_body", "verify_tls",
    ),
    **LOAD,
    "Search and checks": ("find_goodput", "search_steps", "sweep", "flush_cache", "expect_file"),
    "Reports": ("json", "jsonl", "html", "svg", "live", "scrape", "scrape_interval"),
    "Client": ("clients", "max_send_lateness"),
}  # fmt: skip

SIMULATE: Groups = {
    "Nodes and costs": (
        "prefill", "decode", "hardware", "model", "prefill_tp", "decode_tp", "cores", "step_cost", "prompt_token_cost",
        "row_cost", "context_token_cost", "message_cost", "wire_latency", "wire_bandwidth", "kv_bytes_per_token",
        "max_new_tokens", "context_length",
    ),
    **LOAD,
    "Planning": (
        "plan", "experiment", "plan_windows", "plan_requests", "plan_confidence", "plan_processes", "price_per_hour",
    ),
    "Calibration": ("calibrate", "calibrate_seconds", "api_key"),
    "Faults": ("faults", "kill_every", "fault_every", "node_timeout"),
    "Requests": ("request_timeout", "refuse_hopeless", "starvation_bound", "stream_interval"),
    **{title: SERVING[title] for title in ("Memory", "Scheduling", "Priorities and tenants")},
    "Reports and replay": ("json", "html", "progress", "replay", "check"),
}  # fmt: skip

CHAOS: Groups = {
    "Service": ("prefill", "decode", "gateways", "model", "dtype", "transport", "max_total_tokens"),
    "Network": ("namespaces", "mtu", "packet_loss", "packet_delay", "clock_step"),
    "Load": ("requests", "duration", "concurrency", "distinct", "request_timeout", "seed"),
    "Faults": (
        "faults", "kill_every", "fault_every", "node_timeout", "drain_timeout", "max_kill_pause", "check_pauses",
    ),
    "Reports": ("json", "logs", "progress"),
}  # fmt: skip

GROUPS: Mapping[str, Groups] = {
    **dict.fromkeys(("serve", "gateway", "prefill", "decode"), SERVING), "loadtest": LOADTEST, "simulate": SIMULATE,
    "chaos": CHAOS,
}  # fmt: skip

_NODE = (
    "model", "gateway", "name", "device", "dtype", "memory_fraction", "context_length", "advertise_host", "transport",
    "cluster_key",
)  # fmt: skip
USUAL: Mapping[str, tuple[str, ...]] = {
    "serve": (
        "model", "served_model_name", "host", "port", "api_key", "prefill", "decode", "device", "memory_fraction",
        "context_length",
    ),
    "gateway": (
        "model", "served_model_name", "host", "port", "control_host", "control_port", "api_key", "insecure",
        "request_timeout", "log_format",
    ),
    "prefill": _NODE,
    "decode": _NODE,
    "loadtest": (
        "url", "rate", "concurrency", "duration", "num_requests", "input_len", "output_len", "trace", "json", "html",
    ),
    "simulate": (
        "prefill", "decode", "rate", "duration", "input_len", "output_len", "trace", "schedule_policy",
        "max_total_tokens", "json",
    ),
    "chaos": (
        "requests", "faults", "seed", "prefill", "decode", "concurrency", "kill_every", "fault_every", "namespaces",
        "json",
    ),
}  # fmt: skip


def sections(command: str, names: Iterable[str]) -> list[tuple[str, Sequence[str]]]:
    """Return the titles of ``--help`` and the options below each, in order; every option is below one."""
    left = dict.fromkeys(names)
    groups = {"Usual options": USUAL.get(command, ()), **GROUPS.get(command, {})}
    found: list[tuple[str, Sequence[str]]] = []
    for title, members in groups.items():
        here = [name for name in members if name in left]
        for name in here:
            del left[name]
        if here:
            found.append((title, here))
    if left:
        found.append(("Other options", list(left)))
    return found
