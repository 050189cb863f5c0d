"""Tile sizes of the kernels: defaults, and measured ones, which are kept in a file for each kind of GPU.

The file is ``~/.cache/baton/triton/DEVICE.json`` (or below ``$XDG_CACHE_HOME``): tile sizes of attention by
``TileShape.name``, and those of sampling. ``scripts.measure_tiles`` writes it; without it the defaults hold.
"""

import json
import logging
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common.errors import ConfigError
from common.system.cache_folder import cache_folder

log = logging.getLogger(__name__)

#: Shared memory of one program on the smallest GPUs that are served (compute capability 8.6), less a reserve.
SHARED_BYTES = 96 << 10
#: Numbers of the weighted sums of values, for one token, that one program keeps in registers.
MAX_SUMS = 1 << 13


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program of ``paged_attention`` computes.

    Attributes:
        block_m: lines of the tile: new tokens times the query heads of one KV head.
        block_n: keys in one block.
        num_warps, num_stages: options of Triton's compiler.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for size in (self.block_m, self.block_n):
            if not 16 <= size <= 256 or size & (size - 1):
                raise ValueError(f"a block of {size}: give a power of two from 16 to 256")
        if self.num_warps not in (1, 2, 4, 8, 16) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_warps {self.num_warps}, num_stages {self.num_stages}")


#: For prompts and heads of 128 numbers on GPUs with so much shared memory: 1.3 times as fast on an H200 as the tile of
#: GPUs with less, with 2 and with 4 query heads for each KV head.
WIDE_TILE = Tile(128, 128, num_warps=8, num_stages=3)


@dataclass(frozen=True, slots=True)
class TileShape:
    """What the best tile depends on.

    Attributes:
        dtype: of the pages.
        group: query heads of one KV head in one program.
        value_dim: numbers of a value; 0 for ``head_dim``.
    """

    is_decode: bool
    dtype: torch.dtype
    head_dim: int
    group: int
    value_dim: int = 0

    @property
    def name(self) -> str:
        kind = "decode" if self.is_decode else "extend"
        name = f"{kind} {str(self.dtype).removeprefix('torch.')} head_dim={self.head_dim} group={self.group}"
        return name + (f" value_dim={self.value_dim}" if self.value_dim not in (0, self.head_dim) else "")

    @property
    def row_bytes(self) -> int:
        """Bytes of a key in shared memory, where numbers of FP8 have 16 bits. Of a longer value, the value's."""
        value_dim = self.value_dim or self.head_dim
        main_dim = min(self.head_dim, value_dim)
        rest_dim = self.head_dim - main_dim
        dims = max(block_of(value_dim), block_of(main_dim) + (block_of(rest_dim) if rest_dim else 0))
        return dims * max(2, self.dtype.itemsize)

    @property
    def min_lines(self) -> int:
        """The lines of a tile that holds one token: a power of two, at least 16, which ``tl.dot`` needs."""
        return max(16, power_of_two(self.group))


@dataclass(frozen=True, slots=True)
class SamplingTile:
    """How the kernels that draw tokens divide a row of logits.

    Attributes:
        block: logits of one block.
        capacity: likely tokens of a row that are gathered; the last kernel reads them at once.
        num_warps: of the last kernel.
    """

    block: int = 2048
    capacity: int = 4096
    num_warps: int = 8

    def __post_init__(self) -> None:
        for size in (self.block, self.capacity):
            if not 128 <= size <= 16384 or size & (size - 1):
                raise ValueError(f"{size} logits: give a power of two from 128 to 16384")
        if self.num_warps not in (4, 8, 16):
            raise ValueError(f"num_warps {self.num_warps}")


#: The entry of the ``SamplingTile`` among those of attention.
SAMPLING = "sampling"


def power_of_two(number: int) -> int:
    """Return the least power of two that is not less than ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def block_of(dim: int) -> int:
    """Return the width of a tile with rows of ``dim`` numbers: ``tl.dot`` needs a power of two, at least 16."""
    return max(16, power_of_two(dim))


def heads_of_a_program(group: int, value_dim: int) -> int:
    """Return how many of the query heads that share a KV head one program computes: a divisor of ``group``."""
    most = max(1, MAX_SUMS // block_of(value_dim))
    return max(heads for heads in range(1, group + 1) if group % heads == 0 and heads <= most)


def shared_bytes_of(device: torch.device) -> int:
    """Return the shared memory that one program may use on a GPU.

    Raises:
        ConfigError: Triton cannot make the module with which it launches kernels.
    """
    from triton.runtime.driver import driver

    try:
        utils = driver.active.utils
    except (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"Triton cannot make the module with which it launches kernels ({error}): it needs a C compiler, the "
            "headers of Python (Debian, Ubuntu: gcc, python3-dev), libcuda.so.1 of NVIDIA's driver, and a folder whose "
            "files can be written and executed (TRITON_CACHE_DIR)"
        ) from error
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(utils.get_device_properties(index)["max_shared_mem"])


def default_tile(shape: TileShape, shared_bytes: int = SHARED_BYTES) -> Tile:
    """Return a tile whose blocks of keys and values fit into shared memory, twice if possible, beside the queries."""
    if _fits_wide_tile(shape, shared_bytes):
        return WIDE_TILE
    row_bytes = shape.row_bytes
    block_m = shape.min_lines
    if not shape.is_decode:
        if shape.dtype == torch.float32:  # no matrix instructions in full precision: large tiles compile longer
            block_m = max(block_m, 32)
        else:
            # Numbers in FP8 take registers while they become 16 bits.
            most = 128 if row_bytes <= 256 and shape.dtype.itemsize > 1 else 64 if row_bytes <= 512 else 32
            block_m = max(block_m, most)
    left = SHARED_BYTES - block_m * row_bytes
    block_n = 64
    while block_n > 16 and 2 * 2 * block_n * row_bytes > left:
        block_n //= 2
    num_stages = 2 if 2 * 2 * block_n * row_bytes <= left else 1
    is_large = block_m >= 128 or block_m * block_of(shape.value_dim or shape.head_dim) >= 2 * MAX_SUMS
    return Tile(block_m, block_n, num_warps=8 if is_large else 4, num_stages=num_stages)


def _fits_wide_tile(shape: TileShape, shared_bytes: int) -> bool:
    row_bytes = shape.row_bytes
    needed = (WIDE_TILE.block_m + 2 * WIDE_TILE.num_stages * WIDE_TILE.block_n) * row_bytes
    is_usual = shape.dtype.itemsize == 2 and row_bytes == 256 and shape.min_lines <= WIDE_TILE.block_m
    return not shape.is_decode and is_usual and needed <= shared_bytes


def candidates(shape: TileShape, shared_bytes: int) -> list[Tile]:
    """Return the tiles that ``scripts.measure_tiles`` compares; the default is the first."""
    lines = shape.min_lines
    if shape.is_decode:
        sizes = [(lines, block_n, num_warps, 2) for block_n in (32, 64, 128) for num_warps in (2, 4)]
    else:
        sizes = [(max(lines, 64), 64, 4, 3), (max(lines, 128), 64, 4, 3)]
        sizes += [(max(lines, 128), block_n, 8, num_stages) for block_n in (64, 128) for num_stages in (2, 3)]
    return list(dict.fromkeys([default_tile(shape, shared_bytes), *(Tile(*each) for each in sizes)]))


def tiles_file(device_name: str) -> Path:
    """The file of measured tiles. Raises RuntimeError: the user has no home folder."""
    plain = "".join(letter if letter.isalnum() else "-" for letter in device_name)
    return cache_folder() / "triton" / f"{plain}.json"


def stored_tiles(device_name: str) -> dict[str, Tile]:
    """Return the measured tiles of attention on a kind of GPU by the names of their shapes."""
    return {name: tile for name, tile in _stored(device_name).items() if isinstance(tile, Tile)}


def stored_sampling_tile(device_name: str) -> SamplingTile:
    """Return the measured tile of sampling on a kind of GPU; the default if none is stored."""
    tile = _stored(device_name).get(SAMPLING)
    return tile if isinstance(tile, SamplingTile) else SamplingTile()


def _stored(device_name: str) -> dict[str, Tile | SamplingTile]:
    """Return all measured tiles; a damaged file counts as absent."""
    try:
        file = tiles_file(device_name)
        stored = json.loads(file.read_text())
        return {name: (SamplingTile if name == SAMPLING else Tile)(**sizes) for name, sizes in stored.items()}
    except (FileNotFoundError, RuntimeError):
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("cannot read measured tile sizes from %s, using the defaults: %s", file, error)
        return {}


def store_tiles(device_name: str, tiles: Mapping[str, Tile | SamplingTile]) -> Path:
    """Add tiles to the file of a kind of GPU and return the file."""
    file = tiles_file(device_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    merged = {name: asdict(tile) for name, tile in {**_stored(device_name), **tiles}.items()}
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(merged, indent=1, sort_keys=True))
    fresh.replace(file)  # atomic: a node may read it at the same time
    return file


def choose_tile(shape: TileShape, stored: Mapping[str, Tile], shared_bytes: int = SHARED_BYTES) -> Tile:
    """Return the measured tile of a shape; the default if none is stored, or if it has too few lines for one token."""
    tile = stored.get(shape.name)
    return tile if tile and tile.block_m >= shape.min_lines else default_tile(shape, shared_bytes)
