"""How urgent a request is, from what its client says. Pure.

If low values come first, they are negated here, once: everywhere else a higher priority is more urgent.
"""

import dataclasses
from collections.abc import Sequence

from msgspec.structs import replace

from common.config.scheduling import SchedulingOptions
from common.errors import ErrorCode, RequestError
from common.plugins import PriorityFunction, RequestFacts
from common.request import LOWEST_PRIORITY
from gateway.requests.input.generate_request import GenerateRequest


class PriorityResolver:
    """Decides the priority and class of each request.

    Args:
        function: a user's function, which has the last word on priorities.
        is_strict: refuse priorities that have no effect.

    Attributes:
        is_enabled: priorities have an effect.
        is_neutral: a request that names neither a priority nor a class has none.
    """

    def __init__(
        self, options: SchedulingOptions, function: PriorityFunction | None = None, *, is_strict: bool = False
    ) -> None:
        self._function = function
        self.is_enabled = options.enable_priority_scheduling
        self._is_refused = is_strict
        self._is_low_first = options.schedule_low_priority_values_first
        self._classes = options.class_weights
        self._default_class = options.default_class
        self.is_neutral = not (function or self.is_enabled or self._default_class)
        default = options.default_priority_value
        self._default = LOWEST_PRIORITY if default is None else self._signed(default)

    def assign(
        self, requests: Sequence[GenerateRequest], priority: int | None, priority_class: str | None
    ) -> list[GenerateRequest]:
        """The outputs of one HTTP request with their priorities.

        Raises RequestError: the class is unknown, or priorities are refused.
        """
        value, class_name = self._priority(priority), self._class(priority_class)
        assigned = list(requests)
        if value or class_name:
            assigned = [replace(request, priority=value, priority_class=class_name) for request in requests]
        if self._function is None:
            return assigned
        given = [self._function(facts_of(request, is_named=priority is not None)) for request in assigned]
        return [
            request if own is None else replace(request, priority=own)
            for request, own in zip(assigned, given, strict=True)
        ]

    @property
    def has_function(self) -> bool:
        return self._function is not None

    def again(self, request: GenerateRequest, *, waited_s: float, num_waiting: int, num_in_flight: int) -> int | None:
        """The priority that the user's function gives to a request that still waits; None keeps the present one."""
        if self._function is None:
            return None
        facts = facts_of(request, is_named=True)
        return self._function(
            dataclasses.replace(facts, waited_s=waited_s, num_waiting=num_waiting, num_in_flight=num_in_flight)
        )

    def change(self, priority: int | None, priority_class: str | None) -> tuple[int | None, str | None]:
        """A new priority and class for a request in flight; None keeps the present one.

        Raises RequestError: neither is given, or one has no effect on this server.
        """
        if priority is None and priority_class is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, "give a priority, a priority_class or both", param="priority")
        if priority is not None and not self.is_enabled:
            raise _disabled()
        return (
            None if priority is None else self._signed(priority),
            None if priority_class is None else self._class(priority_class),
        )

    def _priority(self, given: int | None) -> int:
        if not self.is_enabled:
            if given is not None and self._is_refused:
                raise _disabled()
            return 0
        return self._default if given is None else self._signed(given)

    def _signed(self, value: int) -> int:
        return -value if self._is_low_first else value

    def _class(self, given: str | None) -> str:
        if given is None:
            return self._default_class
        if given not in self._classes:
            known = ", ".join(self._classes) or "none (the gateway's --priority-classes defines them)"
            message = f"priority_class: {given[:64]!r} is not a priority class; the classes are {known}"
            raise RequestError(ErrorCode.INVALID_REQUEST, message, param="priority_class")
        return given


def facts_of(request: GenerateRequest, *, is_named: bool) -> RequestFacts:
    """The argument of a priority function; the priority is None unless the client set one."""
    return RequestFacts(
        model=request.model,
        tenant=request.tenant,
        priority_class=request.priority_class,
        priority=request.priority if is_named else None,
        num_prompt_tokens=len(request.prompt),
        max_new_tokens=request.sampling.max_new_tokens,
        expected_output=request.expected_output,
        deadline_s=request.timeout_s,
        slo_ttft_s=request.slo_ttft_s,
        slo_itl_s=request.slo_itl_s,
    )


def _disabled() -> RequestError:
    message = (
        "priority: has no effect on this server; leave it out, or start the gateway with --enable-priority-scheduling"
    )
    return RequestError(ErrorCode.INVALID_REQUEST, message, param="priority")
