"""Text to token ids and back. The only place of a deployment that knows characters.

The way back is incremental: tokens come one by one, a character may span several, and what a user has seen can't be
taken back. A byte-level tokenizer (Qwen, Llama 3, GPT) is turned into a table of bytes once; then a token is a look-up
and an incremental UTF-8 decoder, and the pieces joined are what decoding all ids at once gives. Other tokenizers are
decoded in a sliding window.
"""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from common.errors import ConfigError, ErrorCode, RequestError

#: Texts longer than this are worth a thread of their own.
LONG_CHARACTERS = 16 << 10
#: So are so many token ids; a list of them counts as ``LIST_IDS`` more.
LONG_IDS, LIST_IDS = 8_192, 16
#: Lists that the tokenizer takes at once: between two such others have their turn.
LISTS_AT_ONCE = 2_048


def _byte_alphabet() -> dict[str, int]:
    """The characters with which byte-level tokenizers spell the 256 bytes (GPT-2's ``bytes_to_unicode``, inverted)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Detokenizer(Protocol):
    """One output's way from ids to text."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that these further ids complete; never a part of a character."""
        ...

    def flush(self) -> str:
        """What is still held back, with U+FFFD for what no more ids can complete. The last call."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers. ``pieces[id]`` are the bytes of a token; ids outside have none."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        size = len(pieces)
        if len(ids) == 1:
            return self._decode(pieces[ids[0]] if ids[0] < size else b"")
        return self._decode(b"".join(pieces[token] for token in ids if token < size))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other tokenizer: decode the last few ids again and show what has been added and ends whole."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._start = 0  # the window begins here ...
        self._shown = 0  # ... and ids before this one have been shown

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        before, after = self._decode(self._ids[self._start : self._shown]), self._decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        before, after = self._decode(self._ids[self._start : self._shown]), self._decode(self._ids[self._start :])
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special))


class Text:
    """A model's tokenizer, both ways.

    Attributes:
        vocab_size: one more than the largest id that the tokenizer knows.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._pieces: list[bytes] | None = None
        if type(tokenizer.decoder).__name__ == "ByteLevel":
            self._pieces = _byte_pieces(vocabulary, self.vocab_size)
            self._shown_pieces = [b"" if i in special else piece for i, piece in enumerate(self._pieces)]

    @classmethod
    def load(cls, folder: Path) -> "Text":
        """From ``tokenizer.json`` in a folder. Raises ConfigError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"--model {folder}: no tokenizer.json there; the gateway needs a fast tokenizer")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"--model {folder}: tokenizer.json cannot be read: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of a text. Raises RequestError naming ``param`` for text that no UTF-8 can carry."""
        try:
            if len(text) > LONG_CHARACTERS:  # the batch call lets other threads run meanwhile; the single one does not
                encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                ids: list[int] = encodings[0].ids
            else:
                ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"{param}: not valid Unicode text", param=param) from error
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of all these ids at once; ids that the tokenizer does not know stand for nothing."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def decode_all(self, lists: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """As ``decode`` each. Other threads run meanwhile."""
        texts: list[str] = []
        for start in range(0, len(lists), LISTS_AT_ONCE):
            some = [list(ids) for ids in lists[start : start + LISTS_AT_ONCE]]
            texts += self._tokenizer.decode_batch(some, skip_special_tokens=skip_special)
        return texts

    def detokenizer(self, *, skip_special: bool) -> Detokenizer:
        if self._pieces is None:
            return WindowDetokenizer(self._tokenizer, skip_special=skip_special)
        return ByteDetokenizer(self._shown_pieces if skip_special else self._pieces)

    def piece(self, token: int) -> bytes:
        """Bytes of one token, alone; perhaps a part of a character."""
        if self._pieces is not None:
            return self._pieces[token] if token < len(self._pieces) else b""
        return self.decode([token], skip_special=False).encode()


def _byte_pieces(vocabulary: dict[str, int], size: int) -> list[bytes]:
    """Bytes by id. As in the library: a token with any character outside the alphabet stands for its own UTF-8."""
    alphabet = _byte_alphabet()
    pieces = [b""] * size
    for token, i in vocabulary.items():
        try:
            pieces[i] = bytes([alphabet[character] for character in token])
        except KeyError:
            pieces[i] = token.encode()
    return pieces
