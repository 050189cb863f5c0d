"""Measures vLLM; runs in vLLM's own Python, by path, without this repository.

Takes a workload as JSON in its argument, and then questions on standard input, a line of JSON each: ["prefill", tokens]
or ["decode", rows]. Answers on standard output with seconds, and first with 0 when it is ready.

Prompts of prefill are new each time. Those of decode rows are the same in every round, so that vLLM's prefix cache
shortens what comes before the part that is timed.
"""

import json
import os
import random
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    workload = json.loads(sys.argv[1])
    engine = make_engine(workload)
    print(json.dumps(0), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        kind, count = json.loads(line)
        if kind == "prefill":
            seconds = prefill_s(engine, number, count)
        else:
            seconds = decode_s(engine, number, count, workload["context"], workload["num_steps"])
        print(json.dumps(seconds), file=answers, flush=True)


def make_engine(workload: dict[str, Any]) -> Any:
    from vllm import LLM

    rows = workload["max_batch"]
    return LLM(
        model=workload["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enable_prefix_caching=True,
        max_model_len=max(workload["max_prompt"], workload["context"] + workload["num_steps"]) + 16,
        max_num_seqs=rows,
        # All rows are prefilled in one step, so that they decode together.
        max_num_batched_tokens=max(workload["max_prompt"] + 16, rows * workload["context"], 2048),
    ).llm_engine


def prefill_s(engine: Any, number: int, num_tokens: int) -> float:
    add_request(engine, f"{number}", random.Random(f"prompt {number}"), num_tokens, 1)
    started_at = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - started_at


def decode_s(engine: Any, number: int, batch: int, context: int, num_steps: int) -> float:
    """Return the seconds of ``num_steps`` steps after all rows have their first token."""
    for row in range(batch):
        add_request(engine, f"{number}-{row}", random.Random(f"row {row}"), context, num_steps + 1)
    counts: dict[str, int] = {}
    while len(counts) < batch:
        note(engine.step(), counts)
    started_at, before = time.perf_counter(), sum(counts.values())
    while engine.has_unfinished_requests():
        note(engine.step(), counts)
    seconds = time.perf_counter() - started_at
    return seconds * batch * num_steps / (sum(counts.values()) - before)


def note(outputs: Any, counts: dict[str, int]) -> None:
    for output in outputs:
        counts[output.request_id] = len(output.outputs[0].token_ids)


def add_request(engine: Any, name: str, source: random.Random, num_tokens: int, num_new: int) -> None:
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [source.randrange(1, 100_000) for _ in range(num_tokens)]}
    sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    engine.add_request(name, prompt, sampling)


if __name__ == "__main__":
    main()
