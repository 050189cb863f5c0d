"""Pages through a process group of ``torch.distributed``: Gloo between host memories, NCCL between CUDA devices.

Everything but the bytes of pages goes over one TCP connection of the pair, with the handshake, the frames and the
acknowledgements of ``tcp``. Over that connection the pair also forms its group (``rendezvous``), which belongs to this
pair and epoch alone and ends with them. For each page header the reader posts one receive of one page into memory of
its own; the writer sends straight from its pool. So no process is asked for more memory than it has, and the end of
either process shows on the connection whatever the backend makes of it.

Fence: the reader copies each page into its pool itself, under a lock, and only if this peer is permitted to write it at
that moment; ``forbid`` takes that lock, and ``withdraw`` closes the connection and cuts the group. A late page ends in
memory that is never read.

A peer that is stopped in the middle of a page breaks the pair after ``STALL_S``; between pages nothing is waited for.
Blocking calls are made in threads of the pair: one at each end, and another while the group forms. If the peer dies
just after it gave its address, that thread and its socket stay for up to a minute, until Gloo gives up; nothing waits
for them.

Gloo and NCCL authenticate no peer and encrypt nothing. We authenticate the connection over which a group forms, prove
both ends over the group once it has formed, and with a cluster key add a mac to every page, made and checked beside the
backend. Gloo listens on the address of that connection while a group forms, and ends the whole process when its peer
breaks its protocol; in those milliseconds it accepts the first process that dials. So use it on a trusted interface
only.

NCCL has not been run: it needs two GPUs.
"""

from kv_transfer.transports.torch_distributed.reader import GroupReader
from kv_transfer.transports.torch_distributed.writer import GroupWriter

__all__ = ["GroupReader", "GroupWriter"]
