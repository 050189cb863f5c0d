"""Parsers that read an output piece by piece, as coroutines. Pure.

A parser reads the output from its beginning to its end and waits (``yield``) where it needs more of it. So it reads
like the format, and the cut of the output into pieces cannot matter.

Markers of a format are either tokens or ordinary text, which depends on the tokenizer. A marker that is a token counts
only as this token: a model that means the marker writes the token, and the same characters spelled by other tokens are
text, such as an explanation of the format. A marker that is no token of the tokenizer is searched in the text.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

from gateway.text.output_parser import OutputPiece

#: Depth of arrays and objects in a JSON value.
MAX_DEPTH = 128

T = TypeVar("T")
#: A part of a parser: waits where it yields.
Steps = Generator[None, None, T]
#: Takes text that was read.
Sink = Callable[[str], None]

SPACE = re.compile(r"[ \t\r\n]*")
#: JSON outside brackets: scalars, separators and strings without escapes.
_JSON_FLAT = re.compile(r'(?:[ \t\r\n0-9A-Za-z_+\-.,:]++|"[^"\\\x00-\x1f]*+")*+')
_JSON_SCALAR = re.compile(r"[0-9A-Za-z_+\-.]*")
_JSON_CHARACTERS = re.compile(r'[^"\\\x00-\x1f]*')
_CLOSING = {"{": "}", "[": "]"}


class Pieces:
    """Collects pieces; neighbouring texts of one part become one piece."""

    def __init__(self) -> None:
        self._done: list[OutputPiece] = []
        self._make: Callable[[str], OutputPiece] | None = None
        self._part: object = None
        self._texts: list[str] = []

    def add(self, part: object, make: Callable[[str], OutputPiece], text: str) -> None:
        if not text:
            return
        if part != self._part:
            self._close()
            self._part, self._make = part, make
        self._texts.append(text)

    def add_piece(self, piece: OutputPiece) -> None:
        self._close()
        self._done.append(piece)

    def take(self) -> list[OutputPiece]:
        self._close()
        done, self._done = self._done, []
        return done

    def _close(self) -> None:
        if self._make is not None:
            self._done.append(self._make("".join(self._texts)))
        self._part, self._make = None, None
        self._texts = []


class IncrementalParser(ABC):
    """An output parser as a coroutine, with the means to read text, markers and JSON.

    Args:
        token_markers: the markers that are tokens; others are searched in the text.
    """

    def __init__(self, token_markers: Collection[str]) -> None:
        self._token_markers = frozenset(token_markers)
        self._pieces = Pieces()
        self._buffer = ""
        self._at = 0  # what precedes has been read
        self._marker = ""  # a token behind the text of the buffer ...
        self._token: int | None = None  # ... and its id
        self._is_ended = False
        self._steps = self._parse()

    def push(self, text: str, token: int | None = None) -> list[OutputPiece]:
        if not text:
            return []
        if token is None:
            self._buffer = self._buffer[self._at :] + text
            self._at = 0
        else:
            self._marker, self._token = text, token
        next(self._steps, None)
        assert not self._marker, "a parser reads a marker at once"
        return self._pieces.take()

    def flush(self) -> list[OutputPiece]:
        self._is_ended = True
        next(self._steps, None)
        return self._pieces.take()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Read the output; return only at its end."""

    @property
    def _is_at_boundary(self) -> bool:
        """No more text follows that of the buffer, before a marker or the end."""
        return bool(self._marker) or self._is_ended

    def _take(self, end: int) -> str:
        """Read the text of the buffer up to ``end``."""
        text = self._buffer[self._at : end]
        self._at = end
        return text

    def _take_marker(self) -> str:
        """Read the token marker, as if it had been text of the buffer."""
        marker, self._marker = self._marker, ""
        self._buffer, self._at = marker, len(marker)
        return marker

    def _peek(self) -> Steps[str]:
        """The next character, or "" at a token marker or the end."""
        while self._at == len(self._buffer):
            if self._is_at_boundary:
                return ""
            yield
        return self._buffer[self._at]

    def _run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[bool]:
        """Read as much as ``pattern`` matches, a repeated set of characters; False if this is nothing."""
        is_found = False
        while True:
            end = pattern.match(self._buffer, self._at).end()  # type: ignore[union-attr] # it matches the empty text
            if end > self._at:
                is_found = True
                sink(self._take(end))
            if end < len(self._buffer) or self._is_at_boundary:
                return is_found
            yield

    def _literal(self, text: str, sink: Sink) -> Steps[bool]:
        """Read exactly this text, or nothing if another follows."""
        while True:
            following = self._buffer[self._at : self._at + len(text)]
            if following == text:
                self._at += len(text)
                sink(text)
                return True
            if self._is_at_boundary or not text.startswith(following):
                return False
            yield

    def _accept(self, markers: Sequence[str], sink: Sink) -> Steps[str]:
        """Read one of these markers if it comes next, and return it; otherwise read nothing and return ""."""
        if not (yield from self._peek()):
            if self._marker not in markers:
                return ""
            marker = self._take_marker()
            sink(marker)
            return marker
        for marker in markers:
            if marker not in self._token_markers and (yield from self._literal(marker, sink)):
                return marker
        return ""

    def _text_until(self, markers: Sequence[str], sink: Sink) -> Steps[str]:
        """Read text up to the first of these markers, read and return it; "" at the end. Other tokens are text."""
        spelled = [marker for marker in markers if marker not in self._token_markers]
        pattern = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        while True:
            found = pattern.search(self._buffer, self._at) if pattern is not None else None
            end = found.start() if found is not None else len(self._buffer)
            if found is None and not self._is_at_boundary:
                end -= num_prefix(self._buffer, self._at, spelled)
            if end > self._at:
                sink(self._take(end))
            if found is not None:
                self._at = found.end()
                return found.group()
            if self._marker in markers:
                return self._take_marker()
            if self._marker:
                sink(self._take_marker())
            elif self._is_ended:
                return ""
            else:
                yield

    def _json(self, sink: Sink) -> Steps[bool]:
        """Read one JSON value; False if it is broken or cut off, then what follows has not been read.

        Only brackets and strings are checked. A token marker inside a string is content of the string, unless a control
        character has shown that the string is broken.
        """
        character = yield from self._peek()
        if character == '"':
            return (yield from self._json_string(sink))
        if character not in _CLOSING:
            return (yield from self._run(_JSON_SCALAR, sink))
        closing: list[str] = []
        while character:
            if character in _CLOSING and len(closing) < MAX_DEPTH:
                closing.append(_CLOSING[character])
                yield from self._literal(character, sink)
            elif character == closing[-1]:
                closing.pop()
                yield from self._literal(character, sink)
                if not closing:
                    return True
            elif not (yield from self._json_flat(sink)):
                return False
            character = yield from self._peek()
        return False

    def _json_flat(self, sink: Sink) -> Steps[bool]:
        """Read strings, scalars and separators, at least one character."""
        end = _JSON_FLAT.match(self._buffer, self._at).end()  # type: ignore[union-attr] # it matches the empty text
        if end > self._at:
            sink(self._take(end))
            return True
        return self._buffer[self._at] == '"' and (yield from self._json_string(sink))

    def _json_string(self, sink: Sink) -> Steps[bool]:
        """Read a JSON string; False if it is cut off."""
        yield from self._literal('"', sink)
        is_valid = True
        while True:
            yield from self._run(_JSON_CHARACTERS, sink)
            character = yield from self._peek()
            if character == "\\":
                yield from self._escape(sink)
            elif character:
                is_valid &= character == '"'
                yield from self._literal(character, sink)
                if character == '"':
                    return True
            elif self._marker and is_valid:
                sink(self._take_marker())
            else:
                return False

    def _escape(self, sink: Sink) -> Steps[None]:
        """Read a backslash with the character behind it, which are not passed on apart."""
        while self._at + 1 == len(self._buffer) and not self._is_at_boundary:
            yield
        sink(self._take(min(self._at + 2, len(self._buffer))))


def num_prefix(text: str, start: int, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text``, from ``start``, that begins one of the markers."""
    longest = max(map(len, markers), default=1) - 1
    tail = text[max(len(text) - longest, start) :]
    firsts = [place for marker in markers if (place := tail.find(marker[0])) >= 0]
    for place in range(min(firsts, default=len(tail)), len(tail)):
        if any(marker.startswith(tail[place:]) for marker in markers):
            return len(tail) - place
    return 0


def drop(text: str) -> None:
    """The sink of text that has no meaning."""
