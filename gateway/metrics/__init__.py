"""Prometheus series."""
