"""Benchmarks of running services and of parts that are processes."""
