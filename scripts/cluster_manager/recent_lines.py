"""The last lines of a log, which is read piece by piece."""

from collections import deque


class RecentLines:
    """The last lines that were added, numbered from the first one.

    Args:
        max_lines: how many are kept.
    """

    def __init__(self, max_lines: int) -> None:
        self._lines: deque[str] = deque(maxlen=max_lines)
        self._num_added = 0

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._num_added += 1

    def since(self, number: int) -> tuple[int, list[str]]:
        """The number of the next line, and the lines from ``number`` on that are kept; negative: the last ones."""
        num_new = -number if number < 0 else self._num_added - number
        return self._num_added, list(self._lines)[-num_new:] if num_new > 0 else []
