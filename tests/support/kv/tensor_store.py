"""A pool that is a tensor on a device, for transports that take its pages from there."""

from collections.abc import Sequence

import torch
from support.kv.kv_fakes import LAYOUT, MemfdStore

from common.cache.page_layout import PageLayout


class TensorStore(MemfdStore):
    """A store whose pool is on a device; ``memory`` is only a landing area."""

    is_mapped = is_in_place = False

    def __init__(self, num_pages: int, layout: PageLayout = LAYOUT, *, device: str) -> None:
        super().__init__(num_pages, layout)
        self.device_pages = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)  # type: ignore[assignment]

    def read(self, page: int) -> bytes:
        return self.device_pages[page].cpu().numpy().tobytes()

    def put(self, page: int, data: bytes) -> None:
        self.device_pages[page] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.device_pages[page, :1].cpu()  # waits until the device has done it

    def landed(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.put(page, super().read(page))
