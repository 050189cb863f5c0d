"""Token ids to text, one output at a time and incrementally. Pure.

Tokens arrive one by one, a character may span several, and text that was shown cannot be taken back.
"""

from collections.abc import Sequence
from encodings.utf_8 import IncrementalDecoder
from typing import Protocol

from tokenizers import Tokenizer

#: Bytes of one character in UTF-8, each of which may be a token.
MAX_CHARACTER_BYTES = 4
#: Ids that a window holds back before it looks for the reason.
MAX_HELD_IDS = 16


class Detokenizer(Protocol):
    """Turns the ids of one output into text."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; never a part of a character."""
        ...

    def flush(self) -> str:
        """The text still held back, with U+FFFD for incomplete characters."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers, as a table look-up and an incremental UTF-8 decoder.

    Args:
        pieces: the bytes of each token, by id; ids outside have none.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder: IncrementalDecoder | None = None  # until a piece is not ASCII, as hardly any is

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        size = len(pieces)
        if len(ids) == 1:
            piece = pieces[ids[0]] if ids[0] < size else b""
        else:
            piece = b"".join([pieces[token] for token in ids if token < size])
        if self._decoder is None:
            if piece.isascii():
                return piece.decode("ascii")
            self._decoder = IncrementalDecoder("replace")
        elif not self._decoder.buffer and piece.isascii():
            return piece.decode("ascii")
        return self._decoder.decode(piece)

    def flush(self) -> str:
        return "" if self._decoder is None else self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For all other tokenizers: decodes the last few ids again and releases the added text once it is complete.

    After ``MAX_HELD_IDS``, text that is still incomplete, such as bytes that are no character, is released as it is,
    and ids without text, such as special ones, are dropped.

    Args:
        before: the ids in front of the output, if it continues their text. Otherwise a space at its beginning is lost.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = list(before)
        if self._ids and self._decode(self._ids).endswith("\ufffd"):  # they end within a character
            self._ids.clear()
        self._start = 0  # the window begins here ...
        self._shown = len(self._ids)  # ... and ids before this one have been shown

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        before, after = self._decode(self._ids[self._start : self._shown]), self._decode(self._ids[self._start :])
        end = len(self._ids)
        if len(after) > len(before) and not after.endswith("\ufffd"):
            return self._show(before, after, end)
        if end - self._shown <= MAX_HELD_IDS:
            return ""
        for cut in range(end, end - MAX_CHARACTER_BYTES, -1):  # the last character may be incomplete for good reason
            text = self._decode(self._ids[self._start : cut])
            if not text.endswith("\ufffd"):
                return self._show(before, text, cut)
        return self._show(before, after, end)

    def _show(self, before: str, text: str, end: int) -> str:
        """Move the window behind the ids up to ``end``, whose text follows that of the window; drop ids without."""
        if len(text) <= len(before):
            del self._ids[self._shown : end]
            return ""
        self._start, self._shown = self._shown, end
        return text[len(before) :]

    def flush(self) -> str:
        before, after = self._decode(self._ids[self._start : self._shown]), self._decode(self._ids[self._start :])
        return self._show(before, after, len(self._ids))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special))
