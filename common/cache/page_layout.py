"""The layout of KV pages. Only this module knows the order of the axes.

A page holds ``page_size`` tokens of every layer in contiguous memory, so that a transfer needs one descriptor per page.
The axes are ``[layer][key or value][head][token][head_dim]``: the heads of a layer are contiguous, so that a range of
heads is one piece for the keys and one for the values of each layer. Offsets are Python integers and must stay 64-bit.

Keys and values may have different sizes. In a *latent* layout (multi-head latent attention, arXiv 2405.04434) a page
has keys only: the values are the first ``value_dim`` numbers of each key.

In ``fp8_e4m3`` and ``int8`` each key and each value of a token and head has a scale of its own, one byte. The scales of
a head follow its numbers, ``[token]`` after ``[token][head_dim]``: they are part of the page wherever it goes.
"""

from dataclasses import dataclass, replace

#: Bytes of a number in each format of KV pages.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "int8": 1}
#: Bytes of a scale in each format that has scales.
SCALE_BYTES = {"fp8_e4m3": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of a model's KV pages.

    Attributes:
        num_layers, num_kv_heads, head_dim: dimensions of the model, or of this rank's part where heads are split.
            ``head_dim`` counts the numbers of a key.
        dtype: a key of ``ITEM_BYTES``.
        value_dim: numbers of a value; 0 at construction means ``head_dim``.
        is_latent: whether values are the first numbers of keys, and not stored themselves.
        window: tokens of the window, if window layers have pages of their own: a page of the layout is then a slab, as
            ``common.cache.window_pages.LayerGroups`` has them, with ``num_layers`` of either kind. 0: all layers.
        full_slabs, window_slabs: slabs of a page of the layers that see all tokens, and of one of the window layers.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    value_dim: int = 0
    is_latent: bool = False
    window: int = 0
    full_slabs: int = 1
    window_slabs: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Numbers that a page holds for a token and head: of the key, and of the value unless it is in the key."""
        return (self.head_dim,) if self.is_latent else (self.head_dim, self.value_dim)

    @property
    def has_scales(self) -> bool:
        return self.dtype in SCALE_BYTES

    def token_parts(self, dim: int) -> tuple[tuple[int, int], ...]:
        """(offset, bytes per token) of the numbers, and of the scales if there are any, in one head's keys or values.

        Args:
            dim: numbers of a key, or of a value.
        """
        row_bytes = dim * ITEM_BYTES[self.dtype]
        numbers = (0, row_bytes)
        return (numbers, (self.page_size * row_bytes, SCALE_BYTES[self.dtype])) if self.has_scales else (numbers,)

    def head_bytes(self, dim: int) -> int:
        """Bytes of one head's keys or values, of ``dim`` numbers each, in one layer of one page."""
        return self.page_size * sum(num_bytes for _, num_bytes in self.token_parts(dim))

    @property
    def layer_bytes(self) -> int:
        return self.num_kv_heads * sum(self.head_bytes(dim) for dim in self.stored_dims)

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.page_bytes // self.page_size

    def pool_bytes(self, num_pages: int) -> int:
        return num_pages * self.page_bytes

    def offset(self, page: int, *, layer: int = 0, value: bool = False, head: int = 0) -> int:
        """Return the byte offset in the pool of one head's keys (or values) in one layer of one page."""
        assert 0 <= layer < self.num_layers and 0 <= head < self.num_kv_heads and page >= 0
        assert not (value and self.is_latent), "the values are in the keys"
        inside = layer * self.layer_bytes + head * self.head_bytes(self.value_dim if value else self.head_dim)
        if value:
            inside += self.num_kv_heads * self.head_bytes(self.head_dim)
        return page * self.page_bytes + inside

    def of_heads(self, num_kv_heads: int) -> "PageLayout":
        """Return the layout of pages with ``num_kv_heads`` of the KV heads, as one rank has them."""
        return replace(self, num_kv_heads=num_kv_heads)

    def num_pages(self, num_tokens: int) -> int:
        """Return the number of pages for ``num_tokens`` tokens; the last page may be partly filled."""
        return -(-num_tokens // self.page_size)


def kv_heads_of(rank: int, num_ranks: int, num_kv_heads: int) -> range:
    """Return the KV heads of one rank; with more ranks than heads, several ranks have the same head."""
    first = rank * num_kv_heads // num_ranks
    return range(first, first + max(1, num_kv_heads // num_ranks))


def ranks_conflict(num_kv_heads: int, num_ranks: int) -> str:
    """Return the reason why KV heads cannot be divided among ranks; empty if they can."""
    if num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0:
        return ""
    return f"{num_kv_heads} kv heads cannot be divided among {num_ranks} ranks"


#: What must be equal in two layouts, by the field of ``PageLayout``, in words.
_EQUAL = {
    "num_layers": "layers",
    "num_kv_heads": "kv heads",
    "head_dim": "head dim",
    "value_dim": "value dim",
    "dtype": "KV dtype",
    "window": "window",
    "full_slabs": "slabs of a page of full layers",
    "window_slabs": "slabs of a page of window layers",
}


def layout_conflict(one: PageLayout, other: PageLayout) -> str:
    """Return the reason why two nodes cannot transfer pages between them; empty if they can.

    Page sizes may differ if one is a multiple of the other; everything else must be equal.
    """
    if bool(one.window) != bool(other.window):
        return "only one has a pool for window layers: give both or neither a --swa-full-tokens-ratio below 1"
    sizes = f"{one.page_size} and {other.page_size}"
    if one.window and one.page_size != other.page_size:
        return f"with a pool for window layers, the page sizes {sizes} must be equal: change --page-size"
    for field, words in _EQUAL.items():
        mine, yours = getattr(one, field), getattr(other, field)
        if mine != yours:
            fix = ": give both nodes the same --dtype and --kv-cache-dtype" if field == "dtype" else ""
            return f"{words} {mine} and {yours} must be equal{fix}"
    if one.is_latent != other.is_latent:
        return "one has latent pages, the other keys and values; both must be equal"
    small, large = sorted((one.page_size, other.page_size))
    if large % small:
        return f"of the page sizes {sizes} one must be a multiple of the other: change --page-size"
    return ""
