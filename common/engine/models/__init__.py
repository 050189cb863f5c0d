"""The native decoder: configuration, layers, weights."""
