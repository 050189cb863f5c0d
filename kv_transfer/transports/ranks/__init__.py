"""The transports of a node whose ranks have a pool each: every rank sends and receives its own part of each page.

Rank 0 has the state machines of all transfers (``kv_transfer.send``, ``kv_transfer.receive``). To them, the transports
of all ranks are one: ``RanksWriter`` and ``RanksReader``, which any node has, since a node with one rank may have peers
with several. Rank 0 uses its own transports directly. Those of the other ranks run in the processes of these ranks
(``endpoint``), and are used over a socket pair (``remote``).

Every pair of ranks that shares heads (``kv_transfer.page_mapping.head_parts``) has a connection of its own, by any
transport. The connection of the two nodes is attached when all of these are, and broken when one of them is; a write is
over when its part is in place; and the decode node's pages are out of reach only when that is proven of every pair.
"""

from kv_transfer.transports.ranks.reader import RanksReader
from kv_transfer.transports.ranks.writer import RanksWriter

__all__ = ["RanksReader", "RanksWriter"]
