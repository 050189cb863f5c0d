"""The prefill node's end of transfers."""
