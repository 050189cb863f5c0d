"""Stop strings: the text ends before one, or after it if the client wants to see it. Pure.

Text arrives in pieces of any size. The stop string that is complete first ends the text (of several complete at the
same character, the longest), so the result does not depend on where the text was cut.
"""

from collections.abc import Sequence

from gateway.text.incremental_parser import num_prefix


class StopMatcher:
    """Searches one output for its stop strings.

    Args:
        is_kept: the text ends after the stop string instead of before it.
    """

    def __init__(self, stops: Sequence[str], *, is_kept: bool = False) -> None:
        assert all(stops)
        self._is_kept = is_kept
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return the text that can be shown now, and nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, at, self.matched = min(found)
            self._held = ""
            return text[: end if self._is_kept else at]
        shown = len(text) - num_prefix(text, 0, self._stops)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text held back, once the output has ended without a stop string."""
        held, self._held = self._held, ""
        return held
