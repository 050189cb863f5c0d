"""Fixtures of tests whose nodes run in processes of their own."""

from support.kv.transport_ends import fork_server, start, transport

__all__ = ["fork_server", "start", "transport"]
