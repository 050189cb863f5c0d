"""The executor: runs step plans, which are integers, and returns sampled tokens. Code above it handles no tensors.

The executor keeps a request table with the page table, the sampling parameters and the last sampled token of each slot,
so that a plan holds only changes. It decides nothing; asserts check that a plan follows the rules.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.attention import make_attention, resolve_attention
from common.engine.attention.protocol import AttentionBackend
from common.engine.batch import RowArrays, make_batch
from common.engine.kv_pool import KVPool
from common.engine.models.config import ModelConfig
from common.engine.models.decoder import Decoder
from common.engine.models.weights import load_weights
from common.engine.sampling.constraints import MaskedRow, OutputConstraint, StepMasks, TokenMasks
from common.engine.sampling.grammar import GrammarCompiler, load_compiler
from common.engine.sampling.penalties import TokenHistory
from common.engine.sampling.sampler import SamplingRow, prompt_logprobs, sample
from common.engine.sampling.token_masks import TokenMask
from common.errors import ConfigError
from common.sampling_params import SamplingParams, TokenLogprobs
from common.step_plan import Admit, PageDelta, Row, StepPlan, StepResult

if TYPE_CHECKING:
    from llguidance import LLMatcher

#: A choice without any token that satisfies all fields of the request.
NO_TOKEN = "no token satisfies the grammar together with the other fields of the request"


@dataclass(slots=True)
class Slot:
    """One row of the request table, without its page numbers, which are in the executor's page table.

    Attributes:
        history: its tokens so far; None without penalties.
        mask: its allowed tokens and bad words; None if it has neither.
        constraint: what its output may be; None without a grammar and a reasoning budget.
        num_pages: entries of its page table that are set.
    """

    sampling: SamplingParams
    prompt_len: int
    end_ids: tuple[int, ...]
    history: TokenHistory | None
    mask: TokenMask | None
    constraint: OutputConstraint | None
    num_pages: int = 0


class TorchExecutor:
    """Runs step plans on one device.

    Args:
        grammars: compiles the grammars of requests.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        attention: AttentionBackend,
        *,
        num_slots: int,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        config = model.config
        self._grammars = grammars or GrammarCompiler.refusing("this node was started without a tokenizer")
        self._masks = TokenMasks(
            self._grammars.known_ids,
            vocab_size=config.vocab_size,
            device=pool.device,
            num_threads=torch.get_num_threads(),
        )
        self.model = model
        self.pool = pool
        self.num_slots = num_slots
        self._attention = attention
        self._page_size = pool.layout.page_size
        width = pool.layout.num_pages(config.context_length)
        # The operating system zeroes memory at first use, so that unused rows and columns cost nothing.
        self._page_table: NDArray[np.int32] = np.zeros((num_slots, width), np.int32)
        self._slots: list[Slot | None] = [None] * num_slots
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=pool.device)

    def compile_grammar(self, grammar: str) -> "Future[LLMatcher]":
        """Begin to compile a grammar, which must be ready before a request with it is admitted; safe on any thread."""
        return self._grammars.compile(grammar)

    def drop_grammar(self, grammar: str) -> None:
        """Note that no request has a grammar any more; safe on any thread."""
        self._grammars.drop(grammar)

    def run(self, plan: StepPlan) -> StepResult:
        """Apply admits, page deltas and rows, in this order. The KV of all rows is in the pool when this returns."""
        with torch.inference_mode():
            for admit in plan.admits:
                self._admit(admit)
            for delta in plan.pages:
                self._append_pages(delta)
            if not plan.rows:
                return StepResult(plan.step, ())
            return self._extend(plan)

    def warm_up(self, num_tokens: int = 64) -> None:
        """Run steps of ``num_tokens`` tokens, so that the first request does not wait for lazy initialisation.

        Overwrites the pool's first pages, so it must run while the pool is empty. Slot 0 is free afterwards.
        """
        num_tokens = min(num_tokens, self.pool.num_pages * self._page_size - 1, self.model.config.context_length - 1)
        if num_tokens < 1:
            return
        pages = tuple(range(self.pool.layout.num_pages(num_tokens + 1)))
        for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=20, top_p=0.95)):
            admit = Admit(0, params, num_tokens, None)
            self.run(StepPlan(0, (admit,), (PageDelta(0, 0, pages),), (Row(0, 0, (0,) * num_tokens, True),)))
            self.run(StepPlan(0, (), (), (Row(0, num_tokens, None, True),)))
        self._slots[0] = None

    def close(self) -> None:
        """Release the pool; ``run`` must not be called afterwards."""
        self._masks.close()
        self._grammars.close()
        self.pool.close()

    def _admit(self, admit: Admit) -> None:
        assert 0 <= admit.slot < self.num_slots, f"slot {admit.slot} of {self.num_slots}"
        params = admit.sampling
        end_ids = params.stop_token_ids + (() if params.ignore_eos else self.model.config.eos_token_ids)
        vocab_size = self.model.config.vocab_size
        known = tuple(token for token in dict.fromkeys(end_ids) if 0 <= token < vocab_size)
        history = TokenHistory(admit.history, admit.prompt_len) if params.has_penalties else None
        has_mask = params.allowed_token_ids or params.bad_words
        mask = (
            TokenMask(params, admit.history, prompt_len=admit.prompt_len, vocab_size=vocab_size) if has_mask else None
        )
        self._slots[admit.slot] = Slot(params, admit.prompt_len, known, history, mask, self._constraint(admit))
        if admit.last_token is not None:
            assert 0 <= admit.last_token < vocab_size
            self._last_tokens[admit.slot] = admit.last_token

    def _constraint(self, admit: Admit) -> OutputConstraint | None:
        params = admit.sampling
        if not params.grammar and params.thinking is None:
            return None
        assert len(admit.history) >= admit.prompt_len, "a request with a grammar came without its tokens"
        compiled = self._grammars.compiled(params.grammar) if params.grammar else None
        return OutputConstraint(params, compiled, admit.history[admit.prompt_len :])

    def _slot(self, number: int) -> "Slot":
        slot = self._slots[number]
        assert slot is not None, f"a row or pages for slot {number}, which is free"
        return slot

    def _append_pages(self, delta: PageDelta) -> None:
        end = delta.first + len(delta.pages)
        slot = self._slot(delta.slot)
        assert 0 <= delta.first <= slot.num_pages, f"a gap in the page table of slot {delta.slot}"
        assert end <= self._page_table.shape[1], f"slot {delta.slot} grows beyond the context length"
        assert all(0 <= page < self.pool.num_pages for page in delta.pages), "a page outside the pool"
        self._page_table[delta.slot, delta.first : end] = delta.pages
        slot.num_pages = max(end, slot.num_pages)

    def _extend(self, plan: StepPlan) -> StepResult:
        rows = plan.rows
        self._check(rows)
        slots = np.array([row.slot for row in rows])
        starts = np.array([row.start for row in rows], np.int64)
        num_new = np.array([row.num_tokens for row in rows], np.int64)
        width = self.pool.layout.num_pages(int((starts + num_new).max()))  # the table is as wide as the context
        arrays = RowArrays(starts, num_new, self._page_table[slots, :width], self._page_size)
        batch = make_batch(arrays, self.pool.device)
        tokens = self._tokens(rows, batch.first_new)
        sampled = [row for row in rows if row.sample]
        masks = self._begin_masks(sampled)  # on another thread, while the model computes
        with_targets = [row for row in rows if row.targets]
        keep = torch.from_numpy(_kept_positions(rows, batch.first_new)).to(self.pool.device)
        hidden = self.model.hidden_states(tokens, batch.positions, self._attention.prepare(batch), keep)
        chosen, logprobs, errors = self._sample(sampled, hidden[: len(sampled)], masks)
        if not sampled and hidden.is_cuda:  # without sampled tokens the step has not waited for the device yet
            torch.cuda.current_stream(hidden.device).synchronize()
        prompt_logprobs = self._prompt_logprobs(with_targets, hidden[len(sampled) :])
        return StepResult(plan.step, chosen, logprobs, prompt_logprobs, errors)

    def _begin_masks(self, rows: Sequence[Row]) -> "Future[StepMasks] | None":
        masked = []
        for index, row in enumerate(rows):
            slot = self._slot(row.slot)
            if slot.constraint is not None and slot.constraint.is_active:
                num_output = row.start + row.num_tokens - slot.prompt_len
                late_ids = slot.end_ids if num_output < slot.sampling.min_tokens else ()
                masked.append(MaskedRow(index, slot.constraint, late_ids))
        return self._masks.begin(masked) if masked else None

    def _sample(
        self, rows: Sequence[Row], hidden: Tensor, pending: "Future[StepMasks] | None"
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...], tuple[str, ...]]:
        """Sample one token per row from the hidden states ``[len(rows), hidden]`` of their last positions.

        Returns tokens, log-probabilities and errors, as in ``StepResult``.
        """
        if not rows:
            return (), (), ()
        logits = self.model.logits(hidden)
        sampling_rows = [self._sampling_row(row) for row in rows]
        masks = None if pending is None else pending.result()
        chosen, logprobs = sample(logits, sampling_rows, masks)
        self._last_tokens[torch.tensor([row.slot for row in rows], device=self.pool.device)] = chosen
        tokens = tuple(chosen.tolist())
        for row, token in zip(rows, tokens, strict=True):
            slot = self._slot(row.slot)
            if slot.history is not None:
                slot.history.append(token)
            if slot.mask is not None:
                slot.mask.append(token)
            if slot.constraint is not None:
                slot.constraint.append(token)
        return tokens, logprobs, () if masks is None else _errors(masks, logits, chosen)

    def _prompt_logprobs(self, rows: Sequence[Row], hidden: Tensor) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """Return the log-probabilities of each row's targets from the hidden states of the positions before them."""
        tokens = [token for row in rows for token in row.targets]
        num_top = [self._slot(row.slot).sampling.logprobs or 0 for row in rows for _ in row.targets]
        found = iter(prompt_logprobs(hidden, self.model.logits, tokens, num_top))
        return tuple(tuple(islice(found, len(row.targets))) for row in rows)

    def _check(self, rows: tuple[Row, ...]) -> None:
        assert len({row.slot for row in rows}) == len(rows), "a slot has two rows in one step"
        for row in rows:
            assert row.start >= 0
            assert row.num_tokens > 0
            room = self._slot(row.slot).num_pages * self._page_size
            assert row.start + row.num_tokens <= room, f"slot {row.slot} has no page for its last token"
            assert 0 <= row.first_target <= row.num_tokens - len(row.targets), "a target that follows no token"

    def _tokens(self, rows: tuple[Row, ...], first_new: NDArray[np.int64]) -> Tensor:
        """Return ``[N]`` int64 on the device: the plan's tokens, and last sampled tokens, which stay on the device."""
        named = np.zeros(first_new[-1], np.int64)
        unnamed = []
        for index, row in enumerate(rows):
            if row.tokens is None:
                unnamed.append(index)
            else:
                named[first_new[index] : first_new[index + 1]] = row.tokens
        assert 0 <= named.min() <= named.max() < self.model.config.vocab_size, "a token outside the vocabulary"
        tokens = torch.from_numpy(named).to(self.pool.device)
        if unnamed:
            slots = torch.tensor([rows[index].slot for index in unnamed], device=self.pool.device)
            tokens[torch.from_numpy(first_new[unnamed]).to(self.pool.device)] = self._last_tokens[slots]
        return tokens

    def _sampling_row(self, row: Row) -> SamplingRow:
        slot = self._slot(row.slot)
        is_masked = slot.constraint is not None and slot.constraint.is_active  # then the mask heeds min_tokens
        end_ids = () if is_masked else slot.end_ids
        position = row.start + row.num_tokens
        return SamplingRow(slot.sampling, position, slot.prompt_len, end_ids, slot.history, slot.mask)


def _errors(masks: StepMasks, logits: Tensor, tokens: Tensor) -> tuple[str, ...]:
    """Return why each row has no token, as in ``StepResult``; the tokens were sampled from ``logits``."""
    is_blocked: list[bool] = torch.isneginf(logits.gather(1, tokens[:, None]))[:, 0].tolist()
    if not masks.failures and not any(is_blocked):
        return ()
    return tuple(masks.failures.get(i, NO_TOKEN if stuck else "") for i, stuck in enumerate(is_blocked))


def _kept_positions(rows: Sequence[Row], first_new: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return indices of packed tokens: the last of each row that samples, then the tokens before each row's targets."""
    lasts = [first_new[index + 1] - 1 for index, row in enumerate(rows) if row.sample]
    before_targets = [
        first_new[index] + row.first_target + np.arange(len(row.targets))
        for index, row in enumerate(rows)
        if row.targets
    ]
    return np.concatenate([np.array(lasts, np.int64), *before_targets])


def load_executor(
    config: ModelConfig,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    num_slots: int,
    num_pages: int | Callable[[], int],
    page_size: int,
    attention: str = "auto",
    num_threads: int | None = None,
) -> TorchExecutor:
    """Load a checkpoint's weights, allocate the KV pool and return an executor over both.

    Args:
        num_pages: pages of the KV pool; a function is called once the weights are in memory.
        num_threads: compute threads of the process (torch's OpenMP team); None leaves their number as it is.
    Raises:
        ConfigError: the dtype, device or attention backend is unknown, the weights do not match the configuration, or
            the device has too little memory.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    place = check_device(device)
    dtype = config.resolve_dtype(dtype)
    layout = config.layout(page_size, dtype)
    attention = resolve_attention(attention, place, layout)
    try:
        weights = load_weights(config, dtype, place)
        weights.pack()
        pool = KVPool(layout, num_pages() if callable(num_pages) else num_pages, place)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--device {device} has too little memory for the model and its KV pages: lower --memory-fraction or "
            f"--max-total-tokens ({str(error).splitlines()[0]})"
        ) from error
    backend = make_attention(attention, pool, config.num_heads)
    grammars = load_compiler(config.folder, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)
    return TorchExecutor(Decoder(config, weights), pool, backend, num_slots=num_slots, grammars=grammars)


def check_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        ConfigError: the machine has no such device, or Baton does not support it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: unknown device; give cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch finds no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: torch finds only {torch.cuda.device_count()} CUDA devices here")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: not supported; give cpu, cuda or cuda:N")
    return device
