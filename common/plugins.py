"""Loads code of the user: a policy (``--schedule-policy MODULE:NAME``), a function that sets priorities, and functions
that extend the HTTP application.

All are loaded at start. Errors that a policy or a priority function raises later, and invalid results, are logged once
and do not affect requests.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.config.scheduling import is_user_defined
from common.errors import ConfigError
from common.request import LOWEST_PRIORITY, Request
from common.scheduling.policies.base import Policy

log = logging.getLogger(__name__)

_HOOKS = ("order", "arrived", "left", "served")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Properties of a request that a priority function may use.

    Attributes:
        tenant, priority_class: empty: none.
        priority: priority in the request; None: none. Higher is more urgent here, whatever the flags say.
        num_prompt_tokens, max_new_tokens: length of the prompt, and largest length of the output.
        expected_output: predicted number of output tokens; 0: unknown.
        deadline_s: seconds from the arrival to the deadline.
        waited_s: seconds since the arrival; 0 at the first question. Later ones follow about every second, as long as
            the request has no token, and ``priority`` is what it has then.
        num_waiting, num_in_flight: requests at this gateway without a token, and all; 0 at the first question.
        slo_ttft_s, slo_itl_s: objectives of the request; 0: none.
    """

    model: str
    tenant: str
    priority_class: str
    priority: int | None
    num_prompt_tokens: int
    max_new_tokens: int
    expected_output: int
    deadline_s: float
    waited_s: float = 0.0
    num_waiting: int = 0
    num_in_flight: int = 0
    slo_ttft_s: float = 0.0
    slo_itl_s: float = 0.0


class _FailureLog:
    """Counts the failures of a user's code, and logs the first."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self.count = 0

    def add(self, what: str, *, error: Exception | None = None) -> None:
        self.count += 1
        if self.count == 1:
            log.warning("%s %s; later failures are not logged", self._spec, what, exc_info=error)


class PriorityFunction:
    """Calls a user's function from ``RequestFacts`` to a priority."""

    def __init__(self, function: Callable[[RequestFacts], Any], spec: str) -> None:
        self._function = function
        self.failures = _FailureLog(f"--priority-function {spec}")

    def __call__(self, facts: RequestFacts) -> int | None:
        """Return the priority, higher is more urgent; None: keep the priority of the request."""
        try:
            priority = self._function(facts)
        except Exception as error:
            self.failures.add("failed, so requests keep their own priorities", error=error)
            return None
        if priority is None:
            return None
        if type(priority) is not int or not LOWEST_PRIORITY < priority <= -LOWEST_PRIORITY - 1:
            self.failures.add(f"returned {priority!r}, which is not a 32-bit integer")
            return None
        return priority


class UserPolicy(Policy):
    """Calls a user's policy. If it fails, or returns other requests, the order of arrival is used."""

    def __init__(self, policy: Any, spec: str) -> None:
        self.name = spec
        self.overtakes = bool(getattr(policy, "overtakes", False))
        self._policy = policy
        self._failures = _FailureLog(f"--schedule-policy {spec}")

    def totals(self) -> dict[str, float]:
        return {"own_policy_failures": float(self._failures.count)}

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        try:
            ordered = list(self._policy.order(list(waiting), now))
        except Exception as error:
            self._failures.add("failed, so requests are ordered by arrival", error=error)
            return waiting
        if len(ordered) != len(waiting) or set(map(id, ordered)) != set(map(id, waiting)):
            self._failures.add("did not return every waiting request once, so requests are ordered by arrival")
            return waiting
        return ordered

    def arrived(self, request: Request) -> None:
        self._tell(self._policy.arrived, request)

    def left(self, request: Request) -> None:
        self._tell(self._policy.left, request)

    def served(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        self._tell(self._policy.served, request, num_input=num_input, num_output=num_output)

    def _tell(self, hook: Callable[..., object], *args: Request, **counts: int) -> None:
        try:
            hook(*args, **counts)
        except Exception as error:
            self._failures.add("failed", error=error)


def load_policy(spec: str) -> Policy | None:
    """Load and construct a user's policy; None if ``spec`` is a built-in policy.

    Raises:
        ConfigError: the policy cannot be imported or constructed, or lacks a method.
    """
    if not is_user_defined(spec):
        return None
    flag = f"--schedule-policy {spec}"
    make = _imported(spec, flag)
    if not callable(make):
        raise ConfigError(f"{flag} is not a class or a function that returns a policy")
    try:
        policy = make()
    except Exception as error:  # the user's class may raise anything
        raise ConfigError(f"{flag} cannot be constructed without arguments: {error}") from error
    missing = [hook for hook in _HOOKS if not callable(getattr(policy, hook, None))]
    if missing:
        raise ConfigError(
            f"{flag} lacks {', '.join(missing)}: a policy is a class with order(waiting, now), arrived(request), "
            "left(request) and served(request, num_input=, num_output=); derive it from "
            "common.scheduling.policies.base.Policy to inherit defaults"
        )
    return UserPolicy(policy, spec)


def load_priority_function(spec: str | None) -> PriorityFunction | None:
    """Load a user's priority function; None without ``--priority-function``.

    Raises:
        ConfigError: the function cannot be imported, or is not callable.
    """
    if spec is None:
        return None
    flag = f"--priority-function {spec}"
    function = _imported(spec, flag)
    if not callable(function):
        raise ConfigError(f"{flag} is not a function: it must take RequestFacts and return a priority")
    return PriorityFunction(function, spec)


def load_app_plugin(spec: str) -> Callable[[Any], object]:
    """Load a user's function that extends the HTTP application.

    Raises:
        ConfigError: the function cannot be imported, or is not callable; the result raises it if the function fails.
    """
    flag = f"--app-plugin {spec}"
    function = _imported(spec, flag)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"{flag} is not a plain function: it must take the FastAPI application, and not be async")

    def extend(app: Any) -> None:
        try:
            function(app)
        except Exception as error:  # the user's function may raise anything
            raise ConfigError(f"{flag} failed: {error!r}") from error

    return extend


def _imported(spec: str, flag: str) -> Any:
    module_name, _, name = spec.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(f"{flag} cannot be imported: {error}; its folder must be in PYTHONPATH") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{flag}: {found.__name__} has no {name}")
        found = getattr(found, part)
    return found
