"""KV pages from prefill memory to decode memory: one transfer's two ends, and the transports that move the bytes."""
