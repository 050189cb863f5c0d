"""Pages through a process group of ``torch.distributed``: Gloo between host memories, NCCL between CUDA devices.

Everything but the bytes of pages goes over one TCP connection of the pair, with the handshake, the frames and the
acknowledgements of ``tcp``. Over it the pair also forms its group (``group_form``), which belongs to this pair and
epoch alone and ends with them. For each page header the reader posts one receive of one page into memory of its own;
the writer sends straight from its pool. So nobody is asked for more than fits, and the end of either process is seen
on the connection whatever the backend makes of it.

Fence: the reader copies each page into its pool itself, under a lock, and only if this peer is allowed to write it at
that moment; ``forbid`` takes that lock, and ``withdraw`` closes the connection and cuts the group. What comes late
ends in memory that nobody reads.

A peer that is stopped in the middle of a page breaks the pair after ``STALL_S``; between pages nothing is waited for.
What blocks is done in threads of the pair: one at each end, and another while the group forms. If the peer dies just
after it gave its address, that one and its socket stay for up to a minute, until Gloo gives up; nobody waits for them.

Gloo and NCCL authenticate nobody and encrypt nothing. Ours is the connection over which a group forms, a proof over the
group once it has, and with a cluster key a mac of every page, made and checked beside the backend. Gloo listens on the
address of that connection while a group forms, and ends the whole process when its peer breaks its own protocol; a peer
is whoever comes first in those milliseconds. So keep it to an interface that is trusted.

NCCL has not been run: it needs two GPUs.
"""

from kv_transfer.transports.torch_distributed.reader import GroupReader
from kv_transfer.transports.torch_distributed.writer import GroupWriter

__all__ = ["GroupReader", "GroupWriter"]
