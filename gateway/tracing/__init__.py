"""Traces of requests: the ids that clients send, timelines, and their export."""
