"""Remembers which nodes were sent which prefixes of prompts, and so have them cached, probably. Pure.

A prompt is divided into pieces, each of which is one hash. The prompts are a radix tree over these hashes: a run of
pieces with one continuation is one node of the tree. A long prompt therefore costs a few operations for each run that
it shares with others, not for each piece, and however many nodes of the service there are: these are bits of one
integer. The least recently used runs are forgotten first.
"""

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.cache.tree_node import pack

#: Pieces of one prompt that are remembered.
MAX_PIECES = 512
PIECE_BYTES = 8


class _Run:
    """Pieces with one continuation.

    Attributes:
        pieces: their hashes, one after the other.
        holders: bits of the nodes that got all of them, and all before them.
        children: the runs that follow, by their first piece.
    """

    __slots__ = ("children", "holders", "parent", "pieces")

    def __init__(self, parent: "_Run | None", pieces: bytes) -> None:
        self.parent = parent
        self.pieces = pieces
        self.holders = 0
        self.children: dict[bytes, _Run] = {}

    def num_shared_bytes(self, pieces: bytes, begin: int) -> int:
        """Bytes of its pieces with which others go on from ``begin``."""
        if pieces.startswith(self.pieces, begin):
            return len(self.pieces)
        low, high = 1, min(len(self.pieces), len(pieces) - begin) // PIECE_BYTES  # the first piece is equal
        while low < high:
            middle = (low + high + 1) // 2
            if pieces.startswith(self.pieces[: middle * PIECE_BYTES], begin):
                low = middle
            else:
                high = middle - 1
        return low * PIECE_BYTES


class PrefixIndex:
    """The prefixes of prompts, and the nodes that were sent them.

    Args:
        piece_tokens: tokens of a piece.
        max_pieces: remembered for all nodes together.
    """

    def __init__(self, piece_tokens: int, max_pieces: int) -> None:
        self._piece_tokens = piece_tokens
        # A hash is the sum of all tokens up to its end, each times a factor for its place in the piece and one for the
        # piece, modulo 2**64; the factors are the same in every process.
        numbers = np.random.default_rng(0)
        self._token_factors, self._piece_factors = (
            numbers.integers(0, 2**64, count, np.uint64) | np.uint64(1) for count in (piece_tokens, MAX_PIECES)
        )
        self._max_bytes = max_pieces * PIECE_BYTES
        self._root = _Run(None, b"")
        self._runs: OrderedDict[_Run, None] = OrderedDict()  # the least recently used first; each after its children
        self._num_bytes = 0  # of the pieces of all runs
        self._present = 0  # bits of the nodes whose caches count
        self._stale = 0  # bits of nodes that are gone, which runs may still have

    def pieces(self, prompt: Sequence[int], salt: str) -> bytes:
        """Chained hashes of the prompt's leading whole pieces; each covers everything up to its end."""
        num_pieces = min(len(prompt) // self._piece_tokens, MAX_PIECES)
        tokens = np.frombuffer(pack(prompt[: num_pieces * self._piece_tokens]), np.uint32)
        sums = tokens.reshape(num_pieces, self._piece_tokens).astype(np.uint64) @ self._token_factors
        hashes = np.add.accumulate(sums * self._piece_factors[:num_pieces])
        hashes += np.uint64(zlib.crc32(salt.encode()))
        return hashes.tobytes()

    def cached(self, pieces: bytes, num_rows: int) -> NDArray[np.float64] | None:
        """Tokens of a prompt that the node of each row has probably cached; None if no node has any."""
        path, end = self._match(pieces)
        having, begin = self._present, 0  # bits of the nodes that have all runs so far, and the bytes of these runs
        ends: list[int] = []  # bits of nodes that have a part
        sizes: list[int] = []  # how much
        for run in path:
            now = having & run.holders
            if now != having and begin:
                ends.append(having ^ now)
                sizes.append(begin)
            having = now
            if not now:
                break
            begin = min(begin + len(run.pieces), end)
        if having and begin:
            ends.append(having)
            sizes.append(begin)
        if not ends:
            return None
        tokens = np.array(sizes, np.float64) * (self._piece_tokens / PIECE_BYTES)
        return tokens @ _bits(ends, num_rows).astype(np.float64)  # no node is in two rows of the matrix

    def remember(self, pieces: bytes, rows: Iterable[int]) -> None:
        """Nodes get a prompt."""
        bits = 0
        for row in rows:
            bits |= 1 << row
        self._present |= bits
        path, end = self._match(pieces)
        if path and end < sum(len(run.pieces) for run in path):
            path[-1] = self._split(path[-1], end - sum(len(run.pieces) for run in path[:-1]))
        if end < len(pieces):
            run = _Run(path[-1] if path else self._root, pieces[end:])
            path.append(run)
            self._add(run)
        for run in reversed(path):
            run.holders |= bits
            self._runs.move_to_end(run)
        while self._num_bytes > self._max_bytes:
            self._forget_oldest()

    def _match(self, pieces: bytes) -> tuple[list[_Run], int]:
        """The runs with which a prompt begins, and the number of bytes that they share with it.

        The prompt may go on otherwise within the last run.
        """
        path: list[_Run] = []
        run, end = self._root, 0
        while (child := run.children.get(pieces[end : end + PIECE_BYTES])) is not None:
            path.append(child)
            shared = child.num_shared_bytes(pieces, end)
            end += shared
            if shared < len(child.pieces):
                break
            run = child
        return path, end

    def _add(self, run: _Run) -> None:
        assert run.parent is not None
        run.parent.children[run.pieces[:PIECE_BYTES]] = run
        self._runs[run] = None
        self._num_bytes += len(run.pieces)

    def _split(self, run: _Run, num_bytes: int) -> _Run:
        """Make two runs of one. Return the first, which has its first ``num_bytes``."""
        assert run.parent is not None
        first = _Run(run.parent, run.pieces[:num_bytes])
        first.holders = run.holders
        self._num_bytes -= num_bytes
        self._add(first)
        run.parent, run.pieces = first, run.pieces[num_bytes:]
        first.children[run.pieces[:PIECE_BYTES]] = run
        return first

    def _forget_oldest(self) -> None:
        run, _ = self._runs.popitem(last=False)
        assert run.parent is not None and not run.children
        del run.parent.children[run.pieces[:PIECE_BYTES]]
        self._num_bytes -= len(run.pieces)

    def clear(self) -> None:
        """All caches have been emptied."""
        self._root.children.clear()
        self._runs.clear()
        self._num_bytes = 0

    def remove(self, row: int) -> int:
        """A node is gone. Its row is not given to another one before ``sweep``. Return how many such rows there are.

        Its bit is taken from all runs only then, since that takes tens of milliseconds if the index is full.
        """
        self._present &= ~(1 << row)
        self._stale |= 1 << row
        return self._stale.bit_count()

    def sweep(self) -> list[int]:
        """Forget the nodes that are gone. Return their rows, which other nodes may have now."""
        stale, self._stale = self._stale, 0
        for run in self._runs:
            run.holders &= ~stale
        return [int(row) for row in np.flatnonzero(_bits([stale], stale.bit_length()))]


def _bits(numbers: Sequence[int], num_bits: int) -> NDArray[np.uint8]:
    """The bits of each number in a row of a matrix, the lowest first."""
    num_bytes = (num_bits + 7) // 8
    packed = np.frombuffer(b"".join([number.to_bytes(num_bytes, "little") for number in numbers]), np.uint8)
    return np.unpackbits(packed.reshape(len(numbers), num_bytes), axis=1, count=num_bits, bitorder="little")
