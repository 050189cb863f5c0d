"""What a pool of KV pages is to transfers."""

from collections.abc import Sequence
from typing import Any, Protocol

from common.cache.page_layout import PageLayout


class PageStore(Protocol):
    """A pool of KV pages as transfers see it.

    ``fd`` is a memfd of exactly ``layout.pool_bytes(num_pages)`` bytes into which a writer on the same host puts
    pages, and ``memory`` is our own mapping of it. ``is_mapped``: that memory is the pool itself; otherwise the pool is
    on a device, and the memory is a staging area beside it. ``is_in_place``: pages arrive in the pool itself.

    ``device_pages``: the pool's bytes on its device, a uint8 tensor ``[num_pages, page_bytes]`` for transports that
    move device memory; None where there is no device.
    """

    layout: PageLayout
    num_pages: int
    fd: int
    memory: Any  # a writable buffer

    @property
    def is_mapped(self) -> bool: ...

    @property
    def is_in_place(self) -> bool: ...

    @property
    def device_pages(self) -> Any: ...

    def export_page(self, page: int, into: memoryview) -> None:
        """Copy a page's bytes out. Keeps no reference to ``into``."""
        ...

    def landed(self, pages: Sequence[int]) -> None:
        """The bytes of these pages have arrived in ``memory``."""
        ...
