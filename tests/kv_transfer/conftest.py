"""Fixtures of the tests whose ends are processes of their own."""

from support.kv.transport_ends import fork_server, start, transport

__all__ = ["fork_server", "start", "transport"]
