"""Benchmarks of the engine on one machine."""
