"""How much there is to be made of a JSON body, found out before it is decoded. Pure but for the turns of others.

A body within the size limit can hold millions of lists, texts or numbers, and decoding it would hold the event loop for
seconds, since a decoder makes all of them in one go. So they are counted first, a piece of the body at a time: commas
and opening brackets outside of texts, and the texts themselves, keys among them.
"""

import asyncio

import numpy as np
from numpy.typing import NDArray

from common.errors import ErrorCode, RequestError

#: Bodies of so many bytes cannot hold enough to matter.
LIGHT_BYTES = 64 << 10
PIECE_BYTES = 256 << 10
#: Texts (keys too), lists and objects of one body: about 13,000 messages.
MAX_PARTS = 1 << 16
#: Values, token ids for the most part, of one body; more if the context of a model has room for more.
MAX_VALUES = 1 << 18


async def check_weight(body: bytes, max_values: int) -> None:
    """Lets others have their turn between pieces. Raises RequestError: there is too much in the body."""
    counter = Counter()
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
        start += len(piece)
        await asyncio.sleep(0)


class Counter:
    """What has been seen of a body so far.

    Attributes:
        num_parts: texts, lists and objects.
        num_values: of any kind, not counting the first of each list and object.
    """

    def __init__(self) -> None:
        self._num_quotes = self._num_opened = self.num_values = 0
        self._is_inside = False  # a text

    @property
    def num_parts(self) -> int:
        return self._num_quotes // 2 + self._num_opened

    def add(self, piece: bytes) -> None:
        """What comes next, which does not end amid an escape. Where JSON is broken the decoder stops, and so what is
        counted from there on does not matter."""
        codes = np.frombuffer(piece.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        if not len(codes):
            return
        quotes = codes == ord('"')
        inside: NDArray[np.bool_] = np.logical_xor.accumulate(quotes) ^ self._is_inside
        self._num_quotes += int(np.count_nonzero(quotes))
        opened = (codes == ord("[")) | (codes == ord("{"))
        self._num_opened += int(np.count_nonzero(opened > inside))
        self.num_values += int(np.count_nonzero((codes == ord(",")) > inside))
        self._is_inside = bool(inside[-1])


def _too_much(what: str) -> RequestError:
    return RequestError(ErrorCode.BODY_TOO_LARGE, f"the body has more than {what}")
