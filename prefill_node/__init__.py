"""The prefill role: compute prompts in chunked batches and hand their KV pages over."""
