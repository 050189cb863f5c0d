"""On whose account a request is served and how urgent it is, from what its client says. Pure.

The user's values are turned round here, once, if low ones are to come first: everywhere else higher is more urgent.
"""

from dataclasses import dataclass, replace

from common.config.scheduling import SchedulingOptions
from common.errors import ErrorCode, RequestError
from common.plugins import PriorityFunction, RequestFacts
from common.request import LOWEST_PRIORITY
from gateway.requests.output_processor import GenerateRequest


@dataclass(frozen=True, slots=True)
class RequestPriority:
    """Attributes:
    tenant, priority_class: empty for none.
    priority: higher is more urgent.
    is_named: the client named a priority.
    """

    tenant: str = ""
    priority: int = 0
    priority_class: str = ""
    is_named: bool = False


class PriorityResolver:
    """The rules.

    Args:
        options: of scheduling.
        function: a user's, which has the last word on priorities.
    """

    def __init__(self, options: SchedulingOptions, function: PriorityFunction | None = None) -> None:
        self._function = function
        self._is_enabled = options.enable_priority_scheduling
        self._is_refused = options.abort_on_priority_when_disabled
        self._is_low_first = options.schedule_low_priority_values_first
        self._classes = options.class_weights
        self._default_class = options.default_class
        default = options.default_priority_value
        self._default = LOWEST_PRIORITY if default is None else self._turned(default)

    def claim(self, tenant: str, priority: int | None, priority_class: str | None) -> RequestPriority:
        """Of one request. Raises RequestError: the class is unknown, or priorities are refused here."""
        return RequestPriority(tenant, self._priority(priority), self._class(priority_class), priority is not None)

    def judged(self, asks: list[GenerateRequest]) -> list[GenerateRequest]:
        """The outputs of one request with the priorities that the user's function gives them, if there is one."""
        function = self._function
        if function is None:
            return asks
        given = [function(facts_of(ask)) for ask in asks]
        return [
            ask if priority is None else replace(ask, priority=priority)
            for ask, priority in zip(asks, given, strict=True)
        ]

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


def facts_of(ask: GenerateRequest) -> RequestFacts:
    """What a priority function is told."""
    return RequestFacts(
        model=ask.model,
        tenant=ask.tenant,
        priority_class=ask.priority_class,
        priority=ask.priority if ask.is_priority_named else None,
        num_prompt_tokens=len(ask.prompt),
        max_new_tokens=ask.sampling.max_new_tokens,
        expected_output=ask.expected_output,
        deadline_s=ask.timeout_s,
    )


def _disabled() -> RequestError:
    message = "priority: this server serves by arrival; priorities need the gateway's --enable-priority-scheduling"
    return RequestError(ErrorCode.INVALID_REQUEST, message, param="priority")
