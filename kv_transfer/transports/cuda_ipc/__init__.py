"""Pages between the GPU memory of two processes of one host: the writer opens the reader's pool by CUDA IPC, and copies
pages from device to device, within one GPU or from GPU to GPU.

Everything about who may attach is as with shared memory (``transports.shm``): the reader listens on an abstract Unix
socket, and a writer shows the token of its offer, which only ``Connect`` carries. The reader checks the peer's user,
opens a pidfd of its process, and only then sends the IPC handle of its pool. The writer finds bytes there that the
reader has just told it, writes others beside the pool, reads them back, and only then counts as attached.

The fence is ``DETACHED``, which the writer sends after its last copy has ended on the device and the pool is closed, or
the death of the writer: the driver ends the work of a process and takes its memory away before the process has exited.
A writer that cannot find out whether its copies have ended never says ``DETACHED``.

A copy runs on a stream of its own, beside the steps of the model. It may begin at once, since pages are handed to the
sender only when the host has seen the end of the step that computed them. Pages are reported as written when an event
behind their copies has come, so that a step of the reader may read them at once, too.

The handle is of the whole allocation that the pool is in; the pool's place in it is sent along. Memory of torch's
``expandable_segments`` has no such handles and is refused at start. Both processes must see the reader's GPU; where two
GPUs cannot reach each other's memory, attaching fails, and ``auto`` takes the next transport.
"""

from kv_transfer.transports.cuda_ipc.reader import CudaIpcReader
from kv_transfer.transports.cuda_ipc.writer import CudaIpcWriter

__all__ = ["CudaIpcReader", "CudaIpcWriter"]
