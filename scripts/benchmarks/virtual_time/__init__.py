"""Benchmarks of schedulers and of the simulator."""
