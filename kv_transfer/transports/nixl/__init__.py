"""Pages through NIXL: RDMA or whatever else UCX finds between two machines, and shared memory or TCP on one.

The pages of a GPU go through host memory at either end, unless ``--gpu-direct`` moves them directly: then the device's
memory is registered, and so is the memory for probes.

Each process has one agent, with which it registers its pool once. The reader's offer carries the metadata of its agent.
A writer loads it, writes a few bytes beside the pool, reads them back, and only then counts as attached. Pages are
chosen by index from descriptor lists that were prepared for the whole pool.

The backend writes without the reader's consent, so neither closing a connection nor deregistering memory is a fence:
UCX moves pages between processes of one host without the reader's doing, and a transfer handle that is released may go
on (NIXL's makers say both). The fence is the writer's completion: ``done`` returns a ticket only when NIXL says DONE,
``detach`` returns True only when nothing is under way, and a write that ends in an error counts as under way for as
long as the reader lives. On one host the reader also watches the writer's process, as ``shm`` does, and its death is a
fence.

A writer on another host that dies or is out of reach proves nothing. The pages granted to it are taken back by local
invalidation: the reader makes a new agent and drops the old one, with everything that UCX had for it. Other hosts reach
our memory only through what is gone then: over TCP our own process places the bytes, from sockets that are closed; over
RDMA they need the memory's registration and the queue pairs. Processes of this host may have ways in that need no agent
(UCX copies from process to process), so a process that cannot be watched is rejected, and nothing is invalidated while
one is watched. Every pair that used the old agent breaks and is mended under a new epoch. The new offer tells their
writers that writes which failed or hang on their side cannot reach us any more, and that is all they wait for.

When a reader on another host dies during a write, no report of that ever comes. Its writes count as under way for good,
which costs the writer a handle each and no page; see ``Sender``. Failed probes are over as soon as their peer is
detached: bytes that still come can only spoil a later probe, whose attachment is then tried again.

All of this is known of UCX. With another back-end nothing is taken back by invalidation.

NIXL authenticates no peer: a process that knows the metadata, which only ``Connect`` carries, may write. An offer is
sealed with the cluster's key, so that no other process can mislead a writer. Use NIXL on a trusted interface only
(``devices``). ``UCX_TLS`` and similar variables belong to UCX and are left alone.
"""
