"""The choice of a prefill and a decode node for each request."""
