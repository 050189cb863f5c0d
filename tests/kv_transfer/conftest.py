"""Fixtures of tests whose nodes run in processes of their own."""

from support.transport_ends import nursery, start, transport

__all__ = ["nursery", "start", "transport"]
