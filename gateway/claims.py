"""On whose account a request is served and how urgent it is, from what its client says. Pure.

The user's values are turned round here, once, if low ones are to come first: everywhere else higher is more urgent.
"""

from dataclasses import dataclass

from common.errors import ErrorCode, RequestError
from common.request import LOWEST_PRIORITY
from common.scheduling import SchedulingOptions


@dataclass(frozen=True, slots=True)
class Claim:
    """Attributes:
    tenant, priority_class: empty for none.
    priority: higher is more urgent.
    """

    tenant: str = ""
    priority: int = 0
    priority_class: str = ""


class Claims:
    """The rules.

    Args:
        options: of scheduling.
    """

    def __init__(self, options: SchedulingOptions) -> None:
        self._is_enabled = options.enable_priority_scheduling
        self._is_refused = options.abort_on_priority_when_disabled
        self._is_low_first = options.schedule_low_priority_values_first
        self._classes = options.class_weights
        self._default_class = options.default_class
        default = options.default_priority_value
        self._default = LOWEST_PRIORITY if default is None else self._turned(default)

    def claim(self, tenant: str, priority: int | None, priority_class: str | None) -> Claim:
        """Of one request. Raises RequestError: the class is unknown, or priorities are refused here."""
        return Claim(tenant, self._priority(priority), self._class(priority_class))

    def change(self, priority: int | None, priority_class: str | None) -> tuple[int | None, str | None]:
        """What a request that is under way is to have from now on; None for what stays.

        Raises RequestError: nothing is asked for, or something that has no effect here.
        """
        if priority is None and priority_class is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, "give a priority, a priority_class or both", param="priority")
        if priority is not None and not self._is_enabled:
            raise _disabled()
        return (
            None if priority is None else self._turned(priority),
            None if priority_class is None else self._class(priority_class),
        )

    def _priority(self, given: int | None) -> int:
        if not self._is_enabled:
            if given is not None and self._is_refused:
                raise _disabled()
            return 0
        return self._default if given is None else self._turned(given)

    def _turned(self, value: int) -> int:
        return -value if self._is_low_first else value

    def _class(self, given: str | None) -> str:
        if given is None:
            return self._default_class
        if given not in self._classes:
            known = ", ".join(self._classes) or "none; the gateway's --priority-classes makes some"
            message = f"priority_class: {given[:64]!r} is not one of the classes (which are {known})"
            raise RequestError(ErrorCode.INVALID_REQUEST, message, param="priority_class")
        return given


def _disabled() -> RequestError:
    message = "priority: this server serves by arrival; priorities need the gateway's --enable-priority-scheduling"
    return RequestError(ErrorCode.INVALID_REQUEST, message, param="priority")
