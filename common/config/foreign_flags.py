"""Flags of SGLang and vLLM: those that Baton takes under their name, and what to use in place of the others, and of
flags that were renamed.

A flag is an alias only if its meaning is equal in the server arguments of SGLang or the engine arguments of vLLM. Many
flags of SGLang have the same name here, and are not listed. Aliases exist on the command line alone: variables and
files use Baton's names.
"""

import difflib
from collections.abc import Iterable, Mapping

#: Aliases by the name of the option; a switch lists the flags that turn it on and off.
ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("--model-path",),
    "context_length": ("--max-model-len",),
    "page_size": ("--block-size",),
    "tp": ("--tensor-parallel-size", "--tp-size", "-tp"),
    "max_running_requests": ("--max-num-seqs",),
    "disable_radix_cache": ("--no-enable-prefix-caching/--enable-prefix-caching",),
    "disable_cuda_graph": ("--enforce-eager/--no-enforce-eager",),
    "transport": ("--disaggregation-transfer-backend",),
    "tls_cert": ("--ssl-certfile",),
    "tls_key": ("--ssl-keyfile",),
    "workers": ("--api-server-count",),
    "hf_overrides": ("--json-model-override-args",),
    "tokenizer": ("--tokenizer-path",),
}

#: Switches that are accepted without effect, and what Baton does always.
ALWAYS_ON: dict[str, str] = {
    "--enable-auto-tool-choice": "the model may call tools whenever a request has them and --tool-call-parser is set",
    "--enable-metrics": "/metrics is always served",
    "--enable-cache-report": "usage always has the number of cached tokens",
    "--enable-prompt-tokens-details": "usage always has the number of cached tokens",
    "--enable-chunked-prefill": "long prompts are computed in chunks, unless --chunked-prefill-size is -1",
}

#: Flags of earlier versions, and their present names.
RENAMED: dict[str, str] = {"--heartbeat-timeout": "--node-timeout", "--gateway-lookahead": "--max-dispatch-ahead"}

_NO_STAGES = "a node has every layer; give --tp, which divides each layer among several processes, or leave it out"
_ALL_EXPERTS = "every node has all experts; leave it out"
_MORE_NODES = "Baton has no data parallelism in a node; start more nodes, with --prefill N and --decode N of serve"
_NODES_DIAL = "nodes connect to the gateway; start each with --gateway HOST:PORT"
_QUANTIZED = "quantized checkpoints are recognised without a flag; --weight-dtype int8 or int4 rounds others on CPUs"
_HUB_FOLDER = "set HF_HOME in the environment, the folder below which models of the hub are kept"
_OVERRIDES = "give --hf-overrides, which replaces keys of config.json"
_GENERATES = "Baton only generates text; leave it out"
_NO_DRAFTS = "every token is computed by the model itself; leave it out"
_ADAPTERS = "give --lora NAME=DIR, once for each adapter"
_NOT_COMPILED = "the engine does not compile the model; leave it out"
_GRAPH_SIZES = "batch sizes follow from --cuda-graph-max-bs; give that"
_NO_TIERS = "KV pages stay on the device; --memory-fraction and --max-total-tokens set their number"
_MEMORY = "it includes the weights; give --memory-fraction, the share that KV pages take of what the weights leave free"
_GRAMMARS = "llguidance is the only library for structured output; leave it out"
_SEED = "the server has no seed; give `seed` in requests"
_ALL_METHODS = "web pages of --allowed-origins may use all methods and headers; leave it out"
_NO_CLIENT_CERTS = "clients prove themselves with keys; let a proxy before the gateway ask for their certificates"
_CRASH_DUMP = "prompts are never logged; --record writes what a node does, prompts included, to a file"
_DEFAULTS = "requests start from the model's generation_config.json; give other values in requests"
_TEXT_ONLY = "Baton serves only text; leave it out"
_OVERLAP = "a node on CUDA plans a step while another runs, unless --disable-overlap-schedule is given; leave it out"
_ROUTING = "the gateway chooses nodes by cached prefixes and by load; leave it out"
_SINGLE_STEPS = "each step is planned by itself; leave it out"
_NO_STATISTICS = "the log has no statistics, which are in /metrics; leave it out"

#: Flags without an equivalent, and what to do.
NO_EQUAL: dict[str, str] = {
    # parallelism
    **dict.fromkeys(("--pipeline-parallel-size", "--pp-size", "--pp", "-pp"), _NO_STAGES),
    **dict.fromkeys(("--expert-parallel-size", "--ep-size", "--ep", "--enable-expert-parallel"), _ALL_EXPERTS),
    **dict.fromkeys(("--data-parallel-size", "--dp-size", "--dp", "-dp", "--enable-dp-attention"), _MORE_NODES),
    **dict.fromkeys(("--dist-init-addr", "--nnodes", "--node-rank"), _NODES_DIAL),
    # prefill and decode on separate nodes
    "--disaggregation-mode": "start the command of the role: prefill or decode",
    "--disaggregation-bootstrap-port": "give --data-port, the port at which a prefill node waits for decode nodes",
    "--disaggregation-ib-device": "set UCX_NET_DEVICES in the environment, with --transport nixl",
    "--kv-transfer-config": "give --transport",
    "--worker-urls": _NODES_DIAL,
    **dict.fromkeys(("--policy", "--prefill-policy", "--decode-policy", "--load-balance-method"), _ROUTING),
    "--pd-disaggregation": "the gateway always pairs prefill and decode nodes; leave it out",
    # weights and tokenizer
    "--quantization": _QUANTIZED,
    "--download-dir": _HUB_FOLDER,
    "--hf-token": "set HF_TOKEN in the environment",
    **dict.fromkeys(("--rope-scaling", "--rope-theta"), _OVERRIDES),
    **dict.fromkeys(("--task", "--runner", "--convert", "--is-embedding"), _GENERATES),
    "--tokenizer-mode": "the tokenizer is always that of tokenizer.json; leave it out",
    "--skip-tokenizer-init": "the gateway always has a tokenizer; leave it out, and give token ids in requests",
    **dict.fromkeys(("--speculative-algorithm", "--speculative-config", "--speculative-draft-model-path"), _NO_DRAFTS),
    **dict.fromkeys(("--speculative-num-steps", "--speculative-eagle-topk"), _NO_DRAFTS),
    **dict.fromkeys(("--speculative-num-draft-tokens", "--num-speculative-tokens"), _NO_DRAFTS),
    **dict.fromkeys(("--lora-paths", "--lora-modules"), _ADAPTERS),
    "--enable-lora": "give --lora NAME=DIR for adapters at start, and --lora-dir DIR for those that come later",
    **dict.fromkeys(("--max-loras", "--max-loras-per-batch"), "a batch may have every adapter; leave it out"),
    "--max-cpu-loras": "give --max-loaded-loras, which bounds the adapters of a node",
    **dict.fromkeys(("--limit-mm-per-prompt", "--enable-multimodal", "--mm-attention-backend"), _TEXT_ONLY),
    # memory and steps
    "--mem-fraction-static": _MEMORY,
    "--gpu-memory-utilization": _MEMORY,
    "--num-gpu-blocks-override": "give --max-total-tokens, which counts tokens: blocks times --page-size",
    "--kv-cache-memory-bytes": "give --max-total-tokens, which counts tokens",
    **dict.fromkeys(("--enable-hierarchical-cache", "--hicache-ratio", "--hicache-size"), _NO_TIERS),
    **dict.fromkeys(("--kv-offloading-size", "--cpu-offload-gb", "--swap-space"), _NO_TIERS),
    "--schedule-conservativeness": "give --num-reserved-decode-tokens, the room that is kept for each output, to decode"
    " nodes",
    "--max-num-batched-tokens": "it bounds prompt and output tokens of a step together; give --chunked-prefill-size for"
    " the chunks of prompts, and --max-prefill-tokens for a batch of them",
    "--prefill-max-requests": "give --max-prefill-tokens, which bounds a batch of prompts by their tokens",
    "--no-enable-chunked-prefill": "give --chunked-prefill-size -1",
    "--scheduling-policy": "give --schedule-policy; for the policy priority of vLLM, --enable-priority-scheduling and "
    "--schedule-low-priority-values-first",
    **dict.fromkeys(("--cuda-graph-bs", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size"), _GRAPH_SIZES),
    "--max-seq-len-to-capture": _GRAPH_SIZES,
    **dict.fromkeys(("--enable-torch-compile", "--compilation-config"), _NOT_COMPILED),
    "--async-scheduling": _OVERLAP,
    "--no-async-scheduling": "give --disable-overlap-schedule",
    **dict.fromkeys(("--num-scheduler-steps", "--num-continuous-decode-steps"), _SINGLE_STEPS),
    "--prefill-attention-backend": "give --attention-backend to the prefill nodes",
    "--decode-attention-backend": "give --attention-backend to the decode nodes",
    **dict.fromkeys(("--random-seed", "--seed"), _SEED),
    # requests and answers
    **dict.fromkeys(("--grammar-backend", "--guided-decoding-backend", "--structured-outputs-config"), _GRAMMARS),
    **dict.fromkeys(("--generation-config", "--override-generation-config", "--sampling-defaults"), _DEFAULTS),
    "--abort-on-priority-when-disabled": "give --strict-fields, which refuses all request fields that have no effect",
    "--stream-output": "give --incremental-streaming-output",
    "--enable-reasoning": "give --reasoning-parser, if the model's is not recognised",
    "--default-chat-template-kwargs": "give `chat_template_kwargs` in requests",
    "--allow-auto-truncate": "give `truncate_prompt_tokens` in requests",
    "--max-logprobs": "at most 20 alternatives are given for a token; leave it out",
    # process and logs
    **dict.fromkeys(("--log-level-http", "--uvicorn-log-level"), "give --log-level"),
    "--enable-log-requests": "every request is logged when it has ended, without its prompt; leave it out",
    **dict.fromkeys(("--disable-log-requests", "--disable-uvicorn-access-log"), "give --no-log-requests"),
    "--log-requests-level": "--log-requests logs counts and times; prompts and outputs are never logged; leave it out",
    **dict.fromkeys(("--disable-log-stats", "--decode-log-interval"), _NO_STATISTICS),
    "--crash-dump-folder": _CRASH_DUMP,
    "--skip-server-warmup": "serve sends a request for two tokens to see that it is ready; leave it out",
    **dict.fromkeys(("--otlp-traces-endpoint", "--enable-trace"), "give --otlp-endpoint"),
    "--middleware": "give --app-plugin, a function that may add middleware",
    **dict.fromkeys(("--allowed-methods", "--allowed-headers"), _ALL_METHODS),
    "--distributed-executor-backend": "--tp starts the processes of a node; leave it out",
    "--base-gpu-id": "give --device cuda:N",
    "--watchdog-timeout": "give the gateway --node-timeout: a silent node counts as lost",
    **dict.fromkeys(("--ssl-ca-certs", "--ssl-cert-reqs"), _NO_CLIENT_CERTS),
}


def aliases_of(name: str) -> tuple[str, ...]:
    """Return the aliases of an option, each spelled as on a command line."""
    return tuple(flag for alias in ALIASES.get(name, ()) for flag in alias.split("/"))


def unknown_flag(flag: str, known: Iterable[str], elsewhere: Mapping[str, list[str]]) -> str:
    """Return the error for a flag that a command does not take: a translation, the right command, or a close match.

    Args:
        known: the flags of the command, aliases included.
        elsewhere: commands by the flags that they take.
    """
    if flag in RENAMED:
        return f"{flag} has another name now: give {RENAMED[flag]}"
    if flag in NO_EQUAL:
        return f"{flag} of SGLang or vLLM has no equal in Baton: {NO_EQUAL[flag]}"
    if flag in elsewhere:
        return f"{flag} is not an option of this command, but of {', '.join(elsewhere[flag])}"
    near = difflib.get_close_matches(flag, [*known, *NO_EQUAL], n=1, cutoff=0.85)
    if near and near[0] in NO_EQUAL:
        return f"{flag} is not a known option; {near[0]} of SGLang or vLLM has no equal in Baton: {NO_EQUAL[near[0]]}"
    return unknown_option(flag, known)


def unknown_option(flag: str, known: Iterable[str]) -> str:
    """Return the error for a flag that resembles at most one of the known ones."""
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
    return f"{flag} is not a known option" + (f"; did you mean {near[0]}?" if near else "; --help lists all options")
