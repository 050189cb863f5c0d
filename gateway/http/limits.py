"""Bounds how much a decoder would make of a request body.

A body within the size limit can hold millions of lists, strings or numbers. Decoding it would block the event loop for
seconds, since a decoder makes all of them in one call. So they are counted first, one piece of the body at a time:
commas, brackets, points and exponents outside of strings, and the strings themselves, keys included.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import ErrorCode, RequestError

#: Bodies of this size cannot hold enough to matter.
LIGHT_BYTES = 64 << 10
PIECE_BYTES = 256 << 10
#: Strings (keys included), lists and objects of one body: about 13,000 messages.
MAX_PARTS = 1 << 16
#: Values of one body, mostly token ids; more if the context of a model has room for more.
MAX_VALUES = 1 << 18
#: Points and exponents of numbers: one with many digits takes 13 µs to decode.
MAX_DECIMALS = 1 << 14
#: Lists and objects within each other. Encoders bear fewer levels than decoders, since they begin deeper in the stack.
MAX_DEPTH = 256


async def check_weight(body: bytes, max_values: int, counter: "ValueCounter | None" = None) -> None:
    """Count a body's parts, values and levels, yielding to the event loop between pieces.

    Args:
        counter: has counted other texts that belong to the body.

    Raises:
        RequestError: there are too many.
    """
    counter = counter or ValueCounter()
    counter.begin()
    start = 0
    while start < len(body):
        piece = body[start : start + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[start : start + PIECE_BYTES + 1]  # no escape is cut in two
        counter.add(piece)
        if counter.num_parts > MAX_PARTS:
            raise _too_much(f"{MAX_PARTS} texts, lists and objects")
        if counter.num_values > max_values:
            raise _too_much(f"{max_values} values")
        if counter.num_decimals > MAX_DECIMALS:
            raise _too_much(f"{MAX_DECIMALS} points and exponents of numbers")
        if counter.depth > MAX_DEPTH:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"the body is nested more than {MAX_DEPTH} levels deep")
        start += len(piece)
        await asyncio.sleep(0)


async def check_weights(texts: Sequence[str], max_values: int) -> None:
    """As ``check_weight`` for JSON texts within a body, whose weight counts each as one string. Their counts add up."""
    num_parts = sum([text.count('"') // 2 + text.count("[") + text.count("{") for text in texts])
    num_decimals = sum([text.count(".") + text.count("e") + text.count("E") for text in texts])
    num_values = sum([text.count(",") for text in texts])
    if num_parts <= MAX_PARTS and num_values <= max_values and num_decimals <= MAX_DECIMALS:
        return  # with those inside strings, so there are not more
    counter = ValueCounter()
    for text in texts:
        await check_weight(text.encode(), max_values, counter)


class ValueCounter:
    """Counts of the part of a body seen so far.

    Attributes:
        num_parts: strings, lists and objects.
        num_values: values of any kind, without the first of each list and object.
        num_decimals: points and exponents of numbers.
        depth: most lists and objects that are within each other.
    """

    def __init__(self) -> None:
        self._num_quotes = self._num_opened = self.num_values = self.num_decimals = self.depth = 0
        self._level = 0  # lists and objects that are open
        self._is_inside = False  # a string

    @property
    def num_parts(self) -> int:
        return self._num_quotes // 2 + self._num_opened

    def begin(self) -> None:
        """The next piece begins a text."""
        self._level, self._is_inside = 0, False

    def add(self, piece: bytes) -> None:
        """Count the next piece, which must not end inside an escape. Counts after broken JSON do not matter: the
        decoder stops there."""
        codes = np.frombuffer(piece.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        if not len(codes):
            return
        quotes = codes == ord('"')
        inside: NDArray[np.bool_] = np.logical_xor.accumulate(quotes) ^ self._is_inside
        self._num_quotes += int(np.count_nonzero(quotes))
        opened = ((codes == ord("[")) | (codes == ord("{"))) > inside
        closed = ((codes == ord("]")) | (codes == ord("}"))) > inside
        self._num_opened += int(np.count_nonzero(opened))
        levels = self._level + np.cumsum(np.where(opened, 1, -1)[opened | closed])
        if len(levels):
            self._level, self.depth = int(levels[-1]), max(self.depth, int(levels.max()))
        self.num_values += int(np.count_nonzero((codes == ord(",")) > inside))
        is_digit = (codes[:-1] >= ord("0")) & (codes[:-1] <= ord("9"))  # others precede the letter in true and false
        exponents = is_digit & ((codes[1:] | 0x20) == ord("e"))
        self.num_decimals += int(np.count_nonzero((codes == ord(".")) > inside))
        self.num_decimals += int(np.count_nonzero(exponents > inside[1:]))
        self._is_inside = bool(inside[-1])


def _too_much(what: str) -> RequestError:
    return RequestError(ErrorCode.BODY_TOO_LARGE, f"the body has more than {what}")
