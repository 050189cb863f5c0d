"""A step that is queued on the device: what the host reads of it once it has ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from common.engine.device_copies import HostCopies
from common.engine.sampling.logprobs import LogprobTensors
from common.sampling_params import TokenLogprobs
from common.step_plan import StepResult

#: A choice without any token that satisfies all fields of the request.
NO_TOKEN = "no token satisfies the grammar together with the other fields of the request"


@dataclass(frozen=True, slots=True)
class SampledTensors:
    """What was sampled in a step, for R rows; tensors on the device, or on their way to the host.

    Attributes:
        tokens: ``[R]``.
        logprobs: of the rows that asked; None if no row asked.
        asked: numbers of these rows.
        is_blocked: ``[R]``, whether no token was allowed; None without grammars.
        failures: why a row could not be constrained, by its number.
    """

    tokens: Tensor
    logprobs: LogprobTensors | None = None
    asked: Sequence[int] = ()
    is_blocked: Tensor | None = None
    failures: Mapping[int, str] = field(default_factory=dict)

    def copied(self, copies: HostCopies) -> "SampledTensors":
        """Begin to copy the tensors to the host."""
        return SampledTensors(
            copies.add(self.tokens),
            None if self.logprobs is None else self.logprobs.copied(copies),
            self.asked,
            None if self.is_blocked is None else copies.add(self.is_blocked),
            self.failures,
        )

    def read_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """The log-probabilities of the rows, as in ``StepResult``."""
        if self.logprobs is None:
            return ()
        found = dict(zip(self.asked, self.logprobs.read(), strict=True))
        return tuple(map(found.get, range(len(self.tokens))))

    def read_errors(self) -> tuple[str, ...]:
        """Why rows have no token, as in ``StepResult``."""
        if self.is_blocked is None:
            return ()
        is_blocked: list[bool] = self.is_blocked.tolist()
        if not self.failures and not any(is_blocked):
            return ()
        return tuple(self.failures.get(i, NO_TOKEN if stuck else "") for i, stuck in enumerate(is_blocked))


class PendingStep:
    """A step of which the host has not read the result. Any thread may ask for it.

    Args:
        copies: all copies of the step to the host, which have begun.
        sampled: on the host once they are over, like the other tensors; None if nothing was sampled.
        num_targets: for each row with prompt log-probabilities, how many of ``prompt_logprobs`` are its own.
    """

    def __init__(
        self,
        step: int,
        copies: HostCopies,
        *,
        sampled: SampledTensors | None = None,
        prompt_logprobs: Sequence[LogprobTensors] = (),
        num_targets: Sequence[int] = (),
    ) -> None:
        self._step = step
        self._copies = copies
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        self._num_targets = num_targets

    @property
    def is_done(self) -> bool:
        """Whether ``tokens`` and ``result`` would return at once."""
        return self._copies.is_done

    def tokens(self) -> tuple[int, ...]:
        """Wait for the step, and return its tokens."""
        self._copies.wait()
        return () if self._sampled is None else tuple(self._sampled.tokens.tolist())

    def result(self) -> StepResult:
        """Wait for the step, and return its result. The KV of all its rows is in the pool then."""
        tokens = self.tokens()
        found = iter([one for part in self._prompt_logprobs for one in part.read()])
        prompt_logprobs = tuple(tuple(islice(found, count)) for count in self._num_targets)
        if self._sampled is None:
            return StepResult(self._step, tokens, prompt_logprobs=prompt_logprobs)
        return StepResult(
            self._step, tokens, self._sampled.read_logprobs(), prompt_logprobs, self._sampled.read_errors()
        )
