"""Decides when to repeat a log line about something that has not happened yet, at growing intervals."""

FIRST_S, LAST_S = 2.0, 8.0


class Reminder:
    """When to log again that something is still awaited.

    Args:
        now: when the wait begins.
    """

    def __init__(self, now: float) -> None:
        self._pause_s = FIRST_S
        self._due_at = now + FIRST_S

    def is_due(self, now: float) -> bool:
        """Whether to repeat it now. The first pause is ``FIRST_S``; each is twice the one before, up to ``LAST_S``."""
        if now < self._due_at:
            return False
        self._pause_s = min(2 * self._pause_s, LAST_S)
        self._due_at = now + self._pause_s
        return True
