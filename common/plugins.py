"""What users write themselves: a policy (``--schedule-policy MODULE:NAME``) and a function that sets priorities.

Both are loaded once, at start, outside of the pure part, and run behind a guard: what they raise or get wrong is logged
once and does not harm the requests.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.config.scheduling import is_own
from common.errors import ConfigError
from common.request import LOWEST_PRIORITY, Request
from common.scheduling.policies.base import Policy

log = logging.getLogger(__name__)

_HOOKS = ("order", "arrived", "left", "served")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a priority function is told about a request.

    Attributes:
        model: its name in the API.
        tenant, priority_class: empty if it has none.
        priority: that the user named; None if none. Higher is more urgent here, whatever the flags say.
        num_prompt_tokens, max_new_tokens: what it asks for.
        expected_output: output tokens that it will probably have; 0 if nothing is known.
        deadline_s: seconds until its deadline.
    """

    model: str
    tenant: str
    priority_class: str
    priority: int | None
    num_prompt_tokens: int
    max_new_tokens: int
    expected_output: int
    deadline_s: float


class _Complaints:
    """Says the first time what the user's code got wrong, and counts."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self.count = 0

    def add(self, what: str, *, error: Exception | None = None) -> None:
        self.count += 1
        if self.count == 1:
            log.warning("%s %s; this is said once", self._spec, what, exc_info=error)


class PriorityFunction:
    """A user's function from ``RequestFacts`` to a priority."""

    def __init__(self, function: Callable[[RequestFacts], Any], spec: str) -> None:
        self._function = function
        self._complaints = _Complaints(f"--priority-function {spec}")

    @property
    def num_failures(self) -> int:
        return self._complaints.count

    def __call__(self, facts: RequestFacts) -> int | None:
        """The priority, higher is more urgent; None, and the request's own holds, if the function has none to give."""
        try:
            priority = self._function(facts)
        except Exception as error:
            self._complaints.add("failed, and requests keep their own priorities", error=error)
            return None
        if priority is None:
            return None
        if type(priority) is not int or not LOWEST_PRIORITY < priority <= -LOWEST_PRIORITY - 1:
            self._complaints.add(f"gave {priority!r}, which is no whole number of 32 bits")
            return None
        return priority


class OwnPolicy(Policy):
    """A user's policy. Whenever it fails, or loses or invents requests, the order of arrival holds."""

    def __init__(self, policy: Any, spec: str) -> None:
        self.name = spec
        self._policy = policy
        self._complaints = _Complaints(f"--schedule-policy {spec}")

    @property
    def reason(self) -> str:  # type: ignore[override]  # the user's
        return str(getattr(self._policy, "reason", ""))

    @property
    def overtakes(self) -> bool:  # type: ignore[override]  # the user's
        return bool(getattr(self._policy, "overtakes", False))

    @property
    def choice(self) -> str:  # type: ignore[override]  # the user's
        return str(getattr(self._policy, "choice", ""))

    @property
    def num_failures(self) -> int:
        return self._complaints.count

    def totals(self) -> dict[str, float]:
        return {"own_policy_failures": float(self._complaints.count)}

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        try:
            ordered = list(self._policy.order(list(waiting), now))
        except Exception as error:
            self._complaints.add("failed, and the order of arrival holds", error=error)
            return waiting
        if len(ordered) != len(waiting) or set(map(id, ordered)) != set(map(id, waiting)):
            self._complaints.add("did not give back the requests that wait, each once, and the order of arrival holds")
            return waiting
        return ordered

    def arrived(self, request: Request) -> None:
        self._tell(self._policy.arrived, request)

    def left(self, request: Request) -> None:
        self._tell(self._policy.left, request)

    def missed(self, request: Request) -> None:
        if hasattr(self._policy, "missed"):
            self._tell(self._policy.missed, request)

    def served(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        self._tell(self._policy.served, request, num_input=num_input, num_output=num_output)

    def _tell(self, hook: Callable[..., object], *args: Request, **counts: int) -> None:
        try:
            hook(*args, **counts)
        except Exception as error:
            self._complaints.add("failed", error=error)


def load_policy(spec: str) -> Policy | None:
    """A user's policy, made; None if ``--schedule-policy`` names one of ours.

    Raises:
        ConfigError: it cannot be imported or made, or is no policy.
    """
    if not is_own(spec):
        return None
    flag = f"--schedule-policy {spec}"
    policy = _made(_imported(spec, flag), flag)
    missing = [hook for hook in _HOOKS if not callable(getattr(policy, hook, None))]
    if missing:
        raise ConfigError(
            f"{flag} lacks {', '.join(missing)}: a policy is a class with order(waiting, now), arrived(request), "
            "left(request) and served(request, num_input=, num_output=); "
            "from common.scheduling.policies.base.Policy it inherits what "
            "it does not need"
        )
    return OwnPolicy(policy, spec)


def load_priority_function(spec: str | None) -> PriorityFunction | None:
    """A user's priority function; None without ``--priority-function``.

    Raises:
        ConfigError: it cannot be imported, or is no function.
    """
    if spec is None:
        return None
    flag = f"--priority-function {spec}"
    function = _imported(spec, flag)
    if not callable(function):
        raise ConfigError(f"{flag} is no function: it must take RequestFacts and return a priority")
    return PriorityFunction(function, spec)


def _imported(spec: str, flag: str) -> Any:
    module_name, _, name = spec.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does
        raise ConfigError(f"{flag} cannot be imported: {error} (is its folder in PYTHONPATH?)") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{flag}: there is no {name} in {found.__name__}")
        found = getattr(found, part)
    return found


def _made(found: Any, flag: str) -> Any:
    if not callable(found):
        raise ConfigError(f"{flag} is no class, and nothing else that makes a policy when it is called")
    try:
        return found()
    except Exception as error:  # whatever the user's class does
        raise ConfigError(f"{flag} could not be made without arguments: {error}") from error
