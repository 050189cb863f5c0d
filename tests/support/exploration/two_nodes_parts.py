"""The parts of a world of two nodes: scope, faults, nodes and control connections."""

from dataclasses import dataclass, field
from typing import Protocol

from common.cache.page_allocator import PageAllocator
from common.cache.page_layout import PageLayout
from common.request import RequestKey
from common.wire.messages import Connect, Message
from kv_transfer.page_slices import SlicePair
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.transports.base import Attached, ReaderTransport, WriterTransport
from scripts.simulator.service.inprocess_transport import InProcessReader, InProcessWriter

LAYOUT = PageLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=1, dtype="float16")  # 4 bytes a page
PAGE_BYTES = LAYOUT.page_bytes
JUNK = 0xEE

MESSAGE_FAULTS = ("lose", "repeat", "overtake")
PAGE_FAULTS = ("drop", "copy", "corrupt")
NODE_FAULTS = ("tear", "refuse", "kill prefill", "kill decode")
ROLE_FAULTS = ("abort", "finish early", "cancel", "retract")
TIME_FAULTS = ("lease", "tombstones")
CONNECTION_FAULTS = (*MESSAGE_FAULTS, "tear", "refuse")
FAULTS = MESSAGE_FAULTS + PAGE_FAULTS[:2] + NODE_FAULTS + ROLE_FAULTS + TIME_FAULTS


@dataclass(frozen=True)
class Scope:
    """The size of the state space.

    Attributes:
        sizes: pages of each request.
        first: leading pages of each request that the decode node has cached.
        num_pages: size of either pool.
        faults, num_faults: kinds of faults, and the maximum number in one run.
        can_recall: see ``Wire``.
        has_checksums: corrupted pages are detected.
    """

    sizes: tuple[int, ...] = (2, 1)
    first: int = 0
    num_pages: int = 3
    faults: tuple[str, ...] = FAULTS
    num_faults: int = 1
    can_recall: bool = True
    has_checksums: bool = False


class Store:
    """A pool without a model or a file."""

    is_mapped = is_in_place = True
    fd = -1

    def __init__(self, num_pages: int) -> None:
        self.layout = LAYOUT
        self.num_pages = num_pages
        self.memory = bytearray([JUNK] * LAYOUT.pool_bytes(num_pages))

    def export_page(self, page: int, into: memoryview) -> None:
        into[:] = self.read(page)

    def landed(self, pages: object) -> None:
        pass

    def read(self, page: int) -> bytes:
        return bytes(self.memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])

    def fill(self, page: int, value: int) -> None:
        self.memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = bytes([value]) * PAGE_BYTES


class Watching(Protocol):
    def watch(self, writer: "WatchedWriter", peer: str, source: int, target: int) -> None: ...


class WatchedWriter(InProcessWriter):
    """Reports every write to the world before it happens."""

    world: Watching
    is_refused = False  # the next attachment fails

    def attach(self, peer: str, connect: Connect) -> None:
        super().attach(peer, connect)
        if self.is_refused:
            self.is_refused = False
            self._news[-1] = Attached(peer, connect.epoch, "refused by the test")

    def put(self, peer: str, source: int, target: int, slices: SlicePair | None = None) -> int:
        self.world.watch(self, peer, source, target)
        return super().put(peer, source, target, slices)


@dataclass(eq=False)
class Prefill:
    """A prefill node; ``pages`` of open requests, ``released`` with success of each ended request."""

    name: str
    store: Store
    allocator: PageAllocator
    writer: WatchedWriter
    transport: WriterTransport
    sender: Sender
    pages: dict[RequestKey, list[int]] = field(default_factory=dict)
    num_computed: dict[RequestKey, int] = field(default_factory=dict)
    finished: dict[RequestKey, None] = field(default_factory=dict)
    released: dict[RequestKey, bool] = field(default_factory=dict)


@dataclass(eq=False)
class Decode:
    """A decode node; ``ended`` maps each request to the event that ended it, ``dialled`` holds its prefill nodes."""

    name: str
    store: Store
    allocator: PageAllocator
    reader: InProcessReader
    transport: ReaderTransport
    receiver: Receiver
    begun: dict[RequestKey, None] = field(default_factory=dict)
    ended: dict[RequestKey, str] = field(default_factory=dict)
    dialled: dict[str, None] = field(default_factory=dict)


@dataclass(eq=False)
class Link:
    """A control connection; each end is open until it notices the break."""

    prefill: str
    decode: str
    to_prefill: list[Message] = field(default_factory=list)
    to_decode: list[Message] = field(default_factory=list)
    is_open_at_prefill: bool = True
    is_open_at_decode: bool = True
    is_torn: bool = False
