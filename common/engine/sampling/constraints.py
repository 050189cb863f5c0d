"""Constrains the next token of outputs that have a grammar or a reasoning budget.

The state of an ``OutputConstraint`` is a function of the output tokens so far, so it is rebuilt from ``Admit.history``
after a transfer, a retraction or a resume. Tokens are never taken back.

``TokenMasks`` finds the allowed tokens of a step on a thread while the model computes, so that only an addition to the
logits is left for the time in between. Ids that the tokenizer does not know, such as the padding of the vocabulary, are
never allowed by a grammar.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.device_copies import current_device, to_device
from common.engine.sampling.grammar import check
from common.engine.sampling.reasoning import Phase, ReasoningState
from common.errors import ErrorCode, RequestError
from common.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

#: Processor time that a grammar may take to consume a token or to find a mask; an ordinary one takes less than a tenth.
#: The whole step waits for it, so an output ends when its grammar has taken ``MAX_EXCESS_S`` more than that in all.
ORDINARY_S, MAX_EXCESS_S = 0.01, 0.5
#: A step that waits longer for its masks than this, and so much for each row, makes that many further steps find them
#: one by one, so that each is measured; so does a step in which one is not ordinary.
SLOW_MASKS_S, SLOW_MASK_S, NUM_MEASURED_STEPS = 0.05, 0.002, 100
#: One bit per token id, little endian; set bits are allowed.
Bits = NDArray[np.int32]


class OutputConstraint:
    """What may come next in one output: first its reasoning, then the text of its grammar.

    Args:
        grammar: the compiled grammar in its initial state, which is copied; None without one.
        output: the output tokens so far.
    """

    def __init__(self, params: SamplingParams, grammar: "LLMatcher | None", output: Sequence[int]) -> None:
        self._grammar = grammar
        self._reasoning = None if params.thinking is None else ReasoningState(params.thinking)
        self._matcher: LLMatcher | None = None
        self._unread: list[int] = []  # tokens of the answer that the matcher has not consumed
        self._excess_s = 0.0
        for token in output:
            self.append(token)

    def append(self, token: int) -> None:
        """Count one more output token."""
        if self._reasoning is not None:
            could_begin = self._reasoning.phase is Phase.START
            if self._reasoning.append(token):
                if could_begin:  # white space before the reasoning is no part of the answer
                    self._matcher = None
                    self._unread.clear()
                return
        if self._grammar is not None:
            self._unread.append(token)

    @property
    def is_active(self) -> bool:
        """Whether the next token is constrained."""
        if self._reasoning is not None and self._reasoning.phase is Phase.REASONING:
            return self._reasoning.forced is not None
        return self._grammar is not None

    @property
    def has_answer_to_come(self) -> bool:
        """Whether the output is in its reasoning and has a grammar, so that it must not end yet."""
        is_reasoning = self._reasoning is not None and self._reasoning.phase is Phase.REASONING
        return is_reasoning and self._grammar is not None

    @property
    def forced(self) -> int | None:
        """The only token that may come next, because the reasoning has used up its budget."""
        return None if self._reasoning is None else self._reasoning.forced

    @property
    def start_id(self) -> int | None:
        """The token that may come next beside those of the grammar, because it begins the reasoning."""
        return None if self._reasoning is None else self._reasoning.start_id

    def matcher(self) -> "LLMatcher":
        """Return the grammar's state after all tokens. Raises ``RequestError`` as ``check`` does."""
        if self._matcher is None:
            assert self._grammar is not None
            self._matcher = self._grammar.deep_copy()
        for token in self._unread:
            self.check()
            started_at = time.thread_time()
            self._matcher.consume_token(token)  # unlike ``consume_tokens`` it takes end tokens after the end
            self.charge(time.thread_time() - started_at)
        self._unread.clear()
        self.check()
        return self._matcher

    def charge(self, spent_s: float) -> None:
        """Count the processor time that the grammar has taken to consume a token or to find a mask."""
        self._excess_s += max(0.0, spent_s - ORDINARY_S)

    def check(self) -> None:
        """Raise a ``RequestError`` if the tokens do not follow the grammar, or it has taken too long or too much."""
        assert self._matcher is not None
        check(self._matcher)
        if self._excess_s > MAX_EXCESS_S:
            raise RequestError(ErrorCode.INVALID_REQUEST, "the grammar takes too long to follow; simplify it")


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A row of a step whose next token is constrained.

    Attributes:
        index: number of the row among those that sample.
        late_ids: end tokens that ``min_tokens`` blocks, unless no other token is allowed.
    """

    index: int
    constraint: OutputConstraint
    late_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of some rows of a step. Only valid until the next step begins.

    Attributes:
        indices: the M masked rows.
        biases: ``[M, vocab]`` float32 on the device of the logits: 0 for allowed tokens, else minus infinity.
        failures: why a row cannot be constrained, by its index.
    """

    indices: tuple[int, ...]
    biases: Tensor
    failures: dict[int, str]

    def apply(self, logits: Tensor) -> None:
        """Set the logits ``[R, vocab]`` of tokens that are not allowed to minus infinity, in place.

        An addition costs the same for every mask, and on the CPU a small part of ``masked_fill_``.
        """
        if len(self.indices) == len(logits):
            logits += self.biases
        elif logits.device.type != "cpu":  # one launch for all rows
            logits.index_add_(0, to_device(np.array(self.indices, np.int64), logits.device), self.biases)
        else:
            for index, bias in zip(self.indices, self.biases, strict=True):
                logits[index] += bias


class TokenMasks:
    """Finds the masks of a step on a thread, while the model computes.

    Args:
        known_ids: token ids of the tokenizer; no grammar allows others.
        num_threads: threads that find the masks of different rows.
    """

    def __init__(
        self, known_ids: NDArray[np.int64], *, vocab_size: int, device: torch.device, num_threads: int
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._known = _bits_of(known_ids, vocab_size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token-masks")
        self._thread.submit(int)  # start it now: later, the process may have no further thread
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None  # until there is a grammar
        self._num_measured_steps = 0  # yet to come
        is_set = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.bool_)
        self._bias_of_byte = np.where(is_set, np.float32(0), np.float32(-np.inf))  # [256, 8]
        self._biases = np.empty((0, 4 * len(self._known), 8), np.float32)  # kept, since new memory is slow at first
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, rows: Sequence[MaskedRow]) -> "Future[StepMasks]":
        """Start with the masks of a step. One step at a time."""
        return self._thread.submit(self._find, rows)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _find(self, rows: Sequence[MaskedRow]) -> StepMasks:
        bits = np.zeros((len(rows), len(self._known)), np.int32)
        failures: dict[int, str] = {}
        by_grammar: list[tuple[LLMatcher, int]] = []
        for place, row in enumerate(rows):
            forced = row.constraint.forced
            if forced is not None:
                _allow(bits[place], forced)
                continue
            try:
                by_grammar.append((row.constraint.matcher(), place))
            except RequestError as error:
                failures[row.index] = error.message
        if by_grammar:
            for (_, place), spent_s in zip(by_grammar, self._fill(by_grammar, bits), strict=True):
                rows[place].constraint.charge(spent_s)
        for _, place in by_grammar:
            try:
                rows[place].constraint.check()  # a grammar that has exceeded a limit allows the end tokens
            except RequestError as error:
                failures[rows[place].index] = error.message
            self._complete(bits[place], rows[place])
        return StepMasks(tuple(row.index for row in rows), self._to_biases(bits), failures)

    def _fill(self, matchers: "list[tuple[LLMatcher, int]]", bits: Bits) -> list[float]:
        """Write the tokens that each grammar allows to its row of the bits.

        Returns:
            The processor time of each; 0.0 if several threads have found the masks, which do not tell it.
        """
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        started_at = time.perf_counter()
        spent_s = [0.0] * len(matchers)
        is_measured = self._num_measured_steps > 0 or len(matchers) == 1
        self._num_measured_steps = max(0, self._num_measured_steps - 1)
        executor = None if is_measured else self._threads()
        if executor is not None:
            fill_next_token_bitmask_par(executor, matchers, bits)
        else:
            for index, (matcher, place) in enumerate(matchers):
                begun_at = time.thread_time()
                fill_next_token_bitmask(matcher, bits, place)
                spent_s[index] = time.thread_time() - begun_at
        most_s = SLOW_MASKS_S + SLOW_MASK_S * len(matchers)
        if max(spent_s) > ORDINARY_S or (executor is not None and time.perf_counter() - started_at > most_s):
            self._num_measured_steps = NUM_MEASURED_STEPS
        return spent_s

    def _threads(self) -> "LLExecutor | None":
        from llguidance import LLExecutor

        try:
            self._executor = self._executor or LLExecutor(self._num_threads)
        except ValueError:  # the process may have no further thread
            return None
        return self._executor

    def _complete(self, allowed: Bits, row: MaskedRow) -> None:
        """Block unknown and late ids, and allow the token that begins the reasoning, in place."""
        allowed &= self._known
        if (start_id := row.constraint.start_id) is not None:
            _allow(allowed, start_id)
        if row.late_ids:
            others = allowed & ~_bits_of(np.array(row.late_ids, np.int64), self._vocab_size)
            if others.any():
                allowed[:] = others

    def _to_biases(self, bits: Bits) -> Tensor:
        if self._stream is not None:
            with current_device(self._device), torch.cuda.stream(self._stream):
                on_device = _biases_on_device(torch.from_numpy(bits).to(self._device))
            self._stream.synchronize()
            return on_device[:, : self._vocab_size]
        if len(self._biases) < len(bits):
            self._biases = np.empty((len(bits), *self._biases.shape[1:]), np.float32)
        on_host = self._biases[: len(bits)]
        np.take(self._bias_of_byte, bits.view(np.uint8), axis=0, out=on_host, mode="clip")
        return torch.from_numpy(on_host.reshape(len(bits), -1)[:, : self._vocab_size])


def _biases_on_device(bits: Tensor) -> Tensor:
    """Return ``[M, 32 * words]`` float32 for bits ``[M, words]``."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    is_allowed = ((bits[:, :, None] >> places) & 1).view(len(bits), -1) == 1
    return torch.where(is_allowed, 0.0, -torch.inf)


def _allow(bits: Bits, token: int) -> None:
    bits.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))


def _bits_of(ids: NDArray[np.int64], vocab_size: int) -> Bits:
    """Return bits that are set for ``ids`` alone, a whole number of 32-bit words."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    flags[ids] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
