"""Regular expressions for the names of matrices, as ``rank_pattern`` and ``alpha_pattern`` of an adapter have them.

A pattern must match a name, or what is behind one of its dots, to the end. Python's ``re`` can take longer than any
request for a pattern that is made for it, and an adapter may come from anywhere. The matcher here follows all ways
through a pattern at once: it knows the places of the text that each part can end at, and remembers those of repeated
parts, so that its time has a bound.
"""

import functools
import re
from collections.abc import Callable

#: Returns where a part of a pattern can end in a text, if it begins at one of some places.
Matcher = Callable[["Text", frozenset[int]], frozenset[int]]

MAX_LENGTH, MAX_DEPTH = 512, 8
#: A part that stands for one character.
_ONE = re.compile(r"\[\^?[\w.-]+\]|\\[dDwW.\\$|()*+?^\[\]{}-]|[\w.:/ -]", re.ASCII)
_COUNT = re.compile(r"([*+?])\??|\{(\d{1,2})(?:(,)(\d{0,2}))?\}\??")
#: Patterns whose matches have one length: nearly all that PEFT writes. There may be one for each matrix of a model.
_PLAIN = re.compile(r"\^?((?:[\w-]|\\?\.)*)\$?", re.ASCII)


class Text(str):
    """A name that is matched, and where repeated parts of a pattern end in it."""

    def __init__(self, _: str) -> None:
        self._ends: dict[tuple[Matcher, int], frozenset[int]] = {}

    def ends(self, part: Matcher, starts: frozenset[int]) -> frozenset[int]:
        """Return what ``part`` returns, which is asked once for each place."""
        for start in starts:
            if (part, start) not in self._ends:
                self._ends[part, start] = part(self, frozenset((start,)))
        return frozenset().union(*(self._ends[part, start] for start in starts))


class NamePattern:
    """A regular expression with literals, classes, groups, alternatives, counts, ``^`` and ``$``.

    Raises:
        ValueError: it has something else, such as a look-ahead, or is too long; the message says what and where.
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_LENGTH:
            raise ValueError(f"it has more than {MAX_LENGTH} characters")
        plain = _PLAIN.fullmatch(pattern)
        self._plain = re.compile(pattern) if plain else None
        self._length = len(plain[1].replace("\\", "")) if plain else 0
        self._match = _Parser(pattern).parse()

    def matches(self, name: str) -> bool:
        """Whether the name, or what is behind one of its dots, matches."""
        if self._plain is not None:
            start = len(name) - self._length
            return start >= 0 and name[:start][-1:] in ("", ".") and bool(self._plain.fullmatch(name, start))
        starts = frozenset((0, *(index + 1 for index, character in enumerate(name) if character == ".")))
        return len(name) in self._match(Text(name), starts)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def parse(self) -> Matcher:
        found = self._alternatives(0)
        if self._at < len(self._pattern):
            self._refuse()
        return found

    def _refuse(self) -> None:
        raise ValueError(f"{self._pattern[self._at :][:20]!r} at character {self._at} is not supported here")

    def _takes(self, text: str) -> bool:
        is_next = self._pattern.startswith(text, self._at)
        self._at += len(text) if is_next else 0
        return is_next

    def _alternatives(self, depth: int) -> Matcher:
        found = [self._sequence(depth)]
        while self._takes("|"):
            found.append(self._sequence(depth))
        return functools.partial(_any_of, found)

    def _sequence(self, depth: int) -> Matcher:
        parts: list[Matcher] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            parts.append(self._counted(self._part(depth)))
        return functools.partial(_one_after_the_other, parts)

    def _part(self, depth: int) -> Matcher:
        if self._takes("("):
            if depth == MAX_DEPTH or (not self._takes("?:") and self._pattern.startswith("?", self._at)):
                self._refuse()
            found = self._alternatives(depth + 1)
            if not self._takes(")"):
                self._refuse()
            return found
        if self._takes("^"):
            return lambda _, starts: starts & {0}
        if self._takes("$"):
            return lambda text, starts: starts & {len(text)}
        one = _ONE.match(self._pattern, self._at)
        if one is None:
            self._refuse()
        assert one is not None
        self._at = one.end()
        return functools.partial(_character, self._compiled(one[0]))

    def _compiled(self, one: str) -> re.Pattern[str]:
        try:
            return re.compile(one)
        except re.error as error:
            raise ValueError(f"{one}: {error}") from error

    def _counted(self, part: Matcher) -> Matcher:
        found = _COUNT.match(self._pattern, self._at)
        if found is None:
            return part
        self._at = found.end()
        sign, least, comma, most = found.groups()
        if sign is not None:
            return functools.partial(_repeated, part, int(sign == "+"), 1 if sign == "?" else None)
        limit = int(most) if most else None if comma else int(least)
        return functools.partial(_repeated, part, int(least), limit)


def _character(one: re.Pattern[str], text: Text, starts: frozenset[int]) -> frozenset[int]:
    return frozenset(start + 1 for start in starts if one.match(text, start))


def _any_of(parts: list[Matcher], text: Text, starts: frozenset[int]) -> frozenset[int]:
    return frozenset().union(*(part(text, starts) for part in parts))


def _one_after_the_other(parts: list[Matcher], text: Text, starts: frozenset[int]) -> frozenset[int]:
    for part in parts:
        starts = part(text, starts)
        if not starts:
            break
    return starts


def _repeated(part: Matcher, least: int, most: int | None, text: Text, starts: frozenset[int]) -> frozenset[int]:
    """The places after ``least`` to ``most`` repetitions.

    A part that may be empty keeps every place, so that the places only grow; another one moves all of them on. So
    there are at most as many rounds as the text has places.
    """
    found: frozenset[int] = starts if least == 0 else frozenset()
    count = 0
    while starts and (most is None or count < most):
        before, starts = starts, text.ends(part, starts)
        count += 1
        if count >= least:
            starts -= found
            found |= starts
        elif starts == before:
            found |= starts
            break
    return found
