"""Fixtures of the tests whose ends are processes of their own."""

from support.transport_ends import nursery, start, transport

__all__ = ["nursery", "start", "transport"]
