"""Text to token ids and back; only the gateway handles characters.

A byte-level tokenizer (Qwen, Llama 3, GPT) is turned into a table of bytes once, which makes incremental decoding a
look-up. Other tokenizers are decoded in a sliding window.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import tokenizers

from common.errors import ConfigError, ErrorCode, RequestError
from gateway.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

#: Longer texts are tokenized on a thread.
LONG_CHARACTERS = 16 << 10
#: A text of so many characters, or a list of so many ids, takes half a second and more.
HUGE_CHARACTERS, HUGE_IDS = 512 << 10, 512 << 10
#: Fixed cost of one tokenizer call, expressed in characters.
CALL_CHARACTERS = 128
#: More token ids are decoded on a thread; each list of them counts as ``LIST_IDS`` more.
LONG_IDS, LIST_IDS = 8_192, 16
#: Lists that the library decodes in one call; between two calls other threads run.
LISTS_AT_ONCE = 2_048
#: Token ids of a tokenizer, for which there is a table: far above what models have.
MAX_VOCABULARY = 1 << 24

#: How tokenizers that are not byte-level name the tokens of single bytes.
_BYTE = re.compile("<0x([0-9A-F]{2})>")

Made = TypeVar("Made")


def _byte_alphabet() -> dict[str, int]:
    """The characters with which byte-level tokenizers spell the 256 bytes (GPT-2's ``bytes_to_unicode``, inverted)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """The tokenizer of one model, in both directions.

    Attributes:
        vocab_size: one more than the largest token id.
        special_ids: ids of the special tokens.

    Raises ValueError: it is more than ``MAX_VOCABULARY``.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCABULARY:
            raise ValueError(f"it has the token id {self.vocab_size - 1}, and {MAX_VOCABULARY - 1} is the highest")
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_ids = frozenset(i for i, token in added if token.special)
        self._decoded: dict[int, bytes] = {}  # pieces that were asked for, of a tokenizer that is not byte-level
        self._pieces: list[bytes] | None = None
        if type(tokenizer.decoder).__name__ == "ByteLevel":
            self._pieces = _byte_pieces(vocabulary, self.vocab_size)
            self._shown_pieces = [b"" if i in self.special_ids else piece for i, piece in enumerate(self._pieces)]

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Load ``tokenizer.json`` of a folder. Raises ConfigError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"--model {folder}: there is no tokenizer.json; save the model's fast tokenizer there")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"--model {folder}: tokenizer.json cannot be read: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of a text. Raises RequestError naming ``param`` for text that is not valid Unicode."""
        try:
            # Half the cost of ``encode``, since it keeps no offsets; and other threads run meanwhile.
            encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encodings[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"{param}: not valid Unicode text", param=param) from error
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of these ids; unknown ids are left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def decode_all(self, lists: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """Decode each list. Other threads run meanwhile."""
        texts: list[str] = []
        for start in range(0, len(lists), LISTS_AT_ONCE):
            some = [list(ids) for ids in lists[start : start + LISTS_AT_ONCE]]
            texts += self._tokenizer.decode_batch(some, skip_special_tokens=skip_special)
        return texts

    def detokenizer(self, before: Sequence[int] = (), *, skip_special: bool) -> Detokenizer:
        """A detokenizer for one output; ``before``: the last ids of the text that it continues."""
        if self._pieces is None:
            return WindowDetokenizer(self._tokenizer, before, skip_special=skip_special)
        return ByteDetokenizer(self._shown_pieces if skip_special else self._pieces)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text, such as ``</think>``; None if no single token has it."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def piece(self, token: int) -> bytes:
        """The bytes of one token; they may be a part of a character."""
        if self._pieces is not None:
            return self._pieces[token] if token < len(self._pieces) else b""
        if token not in self._decoded:
            self._decoded[token] = self._decoded_piece(token)
        return self._decoded[token]

    def _decoded_piece(self, token: int) -> bytes:
        if byte := _BYTE.fullmatch(self._tokenizer.id_to_token(token) or ""):
            return bytes.fromhex(byte[1])
        once, twice = (self.decode([token] * count, skip_special=False) for count in (1, 2))
        return twice[len(once) :].encode()  # behind another token: the space at the beginning of a text is left out


def _byte_pieces(vocabulary: dict[str, int], size: int) -> list[bytes]:
    """Bytes by id. As in the library, a token with a character outside the alphabet stands for its own UTF-8."""
    alphabet = _byte_alphabet()
    pieces = [b""] * size
    for token, i in vocabulary.items():
        try:
            pieces[i] = bytes([alphabet[character] for character in token])
        except KeyError:
            pieces[i] = token.encode()
    return pieces


class AsyncTokenizer:
    """Tokenizes and detokenizes for all served models, and keeps slow work off the event loop.

    One thread takes the works one by one. Another one takes huge texts, so that no other work waits for seconds.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._thread_of_huge = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-of-huge-texts")
        self._num_characters = 0  # tokenized on the event loop since its last turn

    def close(self) -> None:
        for thread in (self._thread, self._thread_of_huge):
            thread.shutdown(wait=False, cancel_futures=True)

    async def tokenize(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text. A long text is tokenized on a thread; many short ones yield to the event loop."""
        if len(text) <= LONG_CHARACTERS:
            self._num_characters += len(text) + CALL_CHARACTERS
            if self._num_characters > LONG_CHARACTERS:
                self._num_characters = 0
                await asyncio.sleep(0)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens, param=param)
        return await self.on_thread(
            lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens, param=param),
            is_huge=len(text) > HUGE_CHARACTERS,
        )

    async def detokenize(self, tokenizer: Tokenizer, lists: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
        """Texts of lists of token ids; many ids are decoded on the thread."""
        num_ids = sum(map(len, lists)) + LIST_IDS * len(lists)
        if num_ids <= LONG_IDS:
            return [tokenizer.decode(ids, skip_special=skip_special) for ids in lists]
        return await self.on_thread(
            lambda: tokenizer.decode_all(lists, skip_special=skip_special), is_huge=num_ids > HUGE_IDS
        )

    async def on_thread(self, make: Callable[[], Made], *, is_huge: bool = False) -> Made:
        """Run slow work with text off the event loop.

        A connection has at most one such work, so what waits is bounded by the connections and the size of a body. The
        work of a request whose client leaves is dropped at once, and not when its turn comes.
        """
        waiting, thread = [make], self._thread_of_huge if is_huge else self._thread
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, lambda: waiting[0]())
        finally:
            waiting.clear()
