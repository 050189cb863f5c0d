"""Stop strings: the text ends before one, or after it if the client wants to see it. Pure.

Text arrives in pieces of any size. The stop string that is complete first ends the text (of several complete at the
same character, the longest), so the result does not depend on where the text was cut.
"""

from collections.abc import Sequence


class StopMatcher:
    """Searches one output for its stop strings.

    Args:
        is_kept: the text ends after the stop string instead of before it.
    """

    def __init__(self, stops: Sequence[str], *, is_kept: bool = False) -> None:
        assert all(stops)
        self._is_kept = is_kept
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes more text; returns the text that can be shown now, and nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        end, stop = min(((at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0),
                        default=(0, 0, ""))[::2]  # fmt: skip
        if stop:
            self.matched = stop
            self._held = ""
            return text[:end] if self._is_kept else text[: end - len(stop)]
        keep = self._prefix_at_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, once the output has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _prefix_at_end(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
