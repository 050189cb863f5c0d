"""The layout of KV pages. Only this module knows the order of the axes.

A page holds ``page_size`` tokens of every layer in contiguous memory, so that a transfer needs one descriptor per page.
The axes are ``[layer][key or value][head][token][head_dim]``: the heads of a layer are contiguous, so that a range of
heads is one piece for the keys and one for the values of each layer. Offsets are Python integers and must stay 64-bit.
"""

from dataclasses import dataclass, replace

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of a model's KV pages.

    Attributes:
        num_layers, num_kv_heads, head_dim: dimensions of the model, or of this rank's part where heads are split.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Dimensions of one page: (layers, 2, kv heads, tokens, head_dim)."""
        return (self.num_layers, 2, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's keys (or values) in one layer of one page."""
        return self.page_size * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def pool_bytes(self, num_pages: int) -> int:
        return num_pages * self.page_bytes

    def offset(self, page: int, *, layer: int = 0, value: bool = False, head: int = 0) -> int:
        """Return the byte offset in the pool of one head's keys (or values) in one layer of one page."""
        assert 0 <= layer < self.num_layers and 0 <= head < self.num_kv_heads and page >= 0
        inside = (layer * 2 + int(value)) * self.num_kv_heads + head
        return page * self.page_bytes + inside * self.head_bytes

    def of_heads(self, num_kv_heads: int) -> "PageLayout":
        """Return the layout of pages that have so many of the KV heads, as the pages of one rank do."""
        return replace(self, num_kv_heads=num_kv_heads)

    def num_pages(self, num_tokens: int) -> int:
        """Return the number of pages for ``num_tokens`` tokens; the last page may be partly filled."""
        return -(-num_tokens // self.page_size)


def kv_heads_of(rank: int, num_ranks: int, num_kv_heads: int) -> range:
    """Return the KV heads of one rank; where ranks are more than heads, several ranks have the same one."""
    first = rank * num_kv_heads // num_ranks
    return range(first, first + max(1, num_kv_heads // num_ranks))


def layout_conflict(one: PageLayout, other: PageLayout) -> str:
    """Return the reason why two nodes cannot transfer pages between them; empty if they can.

    Page sizes may differ if one is a multiple of the other; everything else must be equal.
    """
    for field in ("num_layers", "num_kv_heads", "head_dim", "dtype"):
        mine, yours = getattr(one, field), getattr(other, field)
        if mine != yours:
            return f"{field.removeprefix('num_').replace('_', ' ')} {mine} and {yours} must be equal"
    small, large = sorted((one.page_size, other.page_size))
    if large % small:
        return f"of the page sizes {one.page_size} and {other.page_size} one must be a multiple of the other"
    return ""
