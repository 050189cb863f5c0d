"""The executor: runs step plans, which are integers, and returns sampled tokens. Code above it handles no tensors.

The executor keeps a request table with the page table, the sampling parameters and the last sampled token of each slot,
so that a plan holds only changes. It decides nothing; asserts check that a plan follows the rules.

On a GPU a step is only queued: the last sampled tokens stay on the device, where the next step reads them, and
``PendingStep`` waits for the result. A request with penalties, bad words, a grammar or a reasoning budget has state on
the host that its next token depends on. A step that follows one with such rows waits for the tokens of that one, but
only after its own model is queued and before it samples.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.attention.protocol import AttentionBackend, GraphSafeAttention
from common.engine.batch import RowArrays, make_batch
from common.engine.cuda_graphs import DecodeGraphs, DecodeInputs, GraphRunner
from common.engine.device_copies import HostCopies, current_device, to_device
from common.engine.kv_pool import KVPool
from common.engine.models.lora.adapters import LoraWeights, StepAdapters
from common.engine.models.lora.checkpoint import read_adapter
from common.engine.models.protocol import CausalModel
from common.engine.pending_step import PendingStep, SampledTensors
from common.engine.sampling.constraints import MaskedRow, OutputConstraint, StepMasks, TokenMasks
from common.engine.sampling.grammar import GrammarCompiler
from common.engine.sampling.logprobs import LogprobTensors, prompt_logprobs
from common.engine.sampling.penalties import TokenHistory
from common.engine.sampling.sampler import SamplingRow, sample
from common.engine.sampling.token_masks import TokenMask
from common.engine.tensor_parallel.rank_executor import OtherRanks
from common.errors import ConfigError
from common.sampling_params import SamplingParams
from common.step_plan import Admit, PageDelta, Row, StepPlan, StepResult

if TYPE_CHECKING:
    from llguidance import LLMatcher


WARM_UP_TOKENS = 64


@dataclass(slots=True)
class Slot:
    """One row of the request table, without its page numbers, which are in the executor's page table.

    Attributes:
        history: its tokens so far; None without penalties.
        mask: its allowed tokens and bad words; None if it has neither.
        constraint: what its output may be; None without a grammar and a reasoning budget.
        adapter: None for the model itself.
        num_pages, num_window_pages: entries of its page tables that are set.
    """

    sampling: SamplingParams
    prompt_len: int
    end_ids: tuple[int, ...]
    history: TokenHistory | None
    mask: TokenMask | None
    constraint: OutputConstraint | None
    adapter: LoraWeights | None = None
    num_pages: int = 0
    num_window_pages: int = 0

    @property
    def depends_on_tokens(self) -> bool:
        """Whether the host must know all tokens before the next one is sampled."""
        has_mask = self.mask is not None and self.mask.depends_on_tokens
        return self.history is not None or has_mask or self.constraint is not None

    def append(self, token: int) -> None:
        """Count one more output token."""
        if self.history is not None:
            self.history.append(token)
        if self.mask is not None:
            self.mask.append(token)
        if self.constraint is not None:
            self.constraint.append(token)


class UnreadTokens(NamedTuple):
    """Tokens of a step that must be appended to slots before their next tokens are sampled.

    Attributes:
        slots: by the number of the row among those that sampled.
    """

    step: PendingStep
    slots: dict[int, Slot]


class TorchExecutor:
    """Runs step plans on one device.

    Args:
        grammars: compiles the grammars of requests.
        ranks: compute their parts of ``model`` in every step; None: it is the whole model.

    Attributes:
        adapters: the LoRA adapters that requests may have, by id; other threads add and drop them.
    """

    def __init__(
        self,
        model: CausalModel,
        pool: KVPool,
        attention: AttentionBackend,
        *,
        num_slots: int,
        grammars: GrammarCompiler | None = None,
        ranks: OtherRanks | None = None,
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
        self.adapters: dict[str, LoraWeights] = {}
        self._adapter_numbers = itertools.count(1)
        self._attention = attention
        self._ranks = ranks
        self._page_size = pool.layout.page_size
        width = pool.layout.num_pages(config.context_length)
        # The operating system zeroes memory at first use, so that unused rows and columns cost nothing.
        self._page_table: NDArray[np.int32] = np.zeros((num_slots, width), np.int32)
        self._window_table = None if pool.groups is None else np.zeros((num_slots, width), np.int32)
        self._slots: list[Slot | None] = [None] * num_slots
        # One more than there are slots, for the padding rows of graphs.
        self._last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=pool.device)
        self._graphs: DecodeGraphs | None = None
        self._unread: list[UnreadTokens] = []

    @property
    def is_asynchronous(self) -> bool:
        """Whether ``launch`` returns before the step has ended."""
        return self.pool.device.type != "cpu"

    def compile_grammar(self, grammar: str) -> "Future[LLMatcher]":
        """Begin to compile a grammar, which must be ready before a request with it is admitted; safe on any thread."""
        return self._grammars.compile(grammar)

    def drop_grammar(self, grammar: str) -> None:
        """Note that no request has a grammar any more; safe on any thread."""
        self._grammars.drop(grammar)

    def read_adapter(self, folder: Path, *, max_rank: int, root: Path | None = None) -> LoraWeights:
        """Read a LoRA adapter for this model onto its device; safe on any thread.

        The other ranks have it too when this returns, and drop it some time after the last reference to it is gone.

        Raises:
            ConfigError: as ``common.engine.models.lora.checkpoint.read_adapter``, the device has too little memory for
                it, or another rank cannot read it.
            RankLostError: another rank does not answer.
        """
        checkpoint = read_adapter(folder, self.model.adaptable, max_rank=max_rank, root=root)
        try:
            adapter = self.model.make_lora(checkpoint)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{folder}: the device has too little memory for this adapter beside the model and its KV pages: lower "
                f"--memory-fraction or --max-total-tokens, or load fewer adapters ({str(error).splitlines()[0]})"
            ) from error
        if self._ranks is None:
            return adapter
        adapter = replace(adapter, number=next(self._adapter_numbers))
        weakref.finalize(adapter, self._ranks.drop_adapter, adapter.number).atexit = False
        self._ranks.read_adapter(adapter.number, adapter.digest, folder, max_rank=max_rank, root=root)
        return adapter

    def drop_adapter(self, adapter: str) -> None:
        """Forget an adapter that no request has any more, by its id; safe on any thread."""
        dropped = self.adapters.pop(adapter)
        for slot in self._slots:
            if slot is not None and slot.adapter is dropped:
                slot.adapter = None  # its request has ended, and a row of it in a step that runs is ignored

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step to its end."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Apply admits, page deltas and rows, in this order, behind the steps that were launched before."""
        with torch.inference_mode(), current_device(self.pool.device):
            for admit in plan.admits:
                self._admit(admit)
            for delta in plan.pages:
                self._append_pages(delta)
            for delta in plan.windows:
                self._append_window_pages(delta)
            if self._graphs is not None:
                self._graphs.set_pages(plan.pages)
            return self._extend(plan)

    def warm_up(self) -> None:
        """Run a prompt and two decode steps, so that the first request does not wait for lazy initialisation.

        Overwrites the pool's first pages, so it must run while the pool is empty. Slot 0 is free afterwards.
        """
        most = self.pool.num_full_pages if self._window_table is None else self.pool.num_window_pages
        num_tokens = min(WARM_UP_TOKENS, most * self._page_size - 1, self.model.config.context_length - 1)
        if num_tokens < 1:
            return
        pages = tuple(range(self.pool.layout.num_pages(num_tokens + 1)))
        first = Admit(0, SamplingParams(temperature=0.0), num_tokens, None)
        delta = (PageDelta(0, 0, pages),)
        windows = () if self._window_table is None else delta
        self.run(StepPlan(0, (first,), delta, (Row(0, 0, (0,) * num_tokens, True),), windows))
        for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=20, top_p=0.95)):
            admit = Admit(0, params, num_tokens, 0)
            self.run(StepPlan(0, (admit,), delta, (Row(0, num_tokens, None, True),), windows))
        self._slots[0] = None

    def capture_graphs(
        self, runner: GraphRunner, batch_sizes: Iterable[int], *, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        """Capture the decode steps of these batch sizes, which later steps replay where they can.

        The pool's last page is that of padding rows from then on: see ``num_pages``.

        Args:
            progress: called after each capture with the number of graphs so far.
        """
        assert isinstance(self._attention, GraphSafeAttention)
        assert self._ranks is None
        assert self._window_table is None
        with torch.inference_mode(), current_device(self.pool.device):
            inputs = DecodeInputs(
                self._last_tokens,
                self._page_table,
                page_size=self._page_size,
                padding_page=self.pool.num_pages - 1,
            )
            self._graphs = DecodeGraphs(self.model, self._attention, inputs, runner, batch_sizes, progress=progress)

    @property
    def num_pages(self) -> int:
        """Pages of the pool that requests may have."""
        return self.pool.num_full_pages - (self._graphs is not None)

    def close(self) -> None:
        """Release the pool; ``run`` must not be called afterwards."""
        self._graphs = None
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
        adapter = self.adapters.get(admit.adapter)  # None too if its request has ended and the adapter was dropped
        slot = Slot(params, admit.prompt_len, known, history, mask, self._constraint(admit), adapter)
        self._slots[admit.slot] = slot
        if admit.adapter not in self.adapters:
            slot.adapter = None  # dropped meanwhile by another thread, which may not have seen the slot
        if admit.last_token is not None:
            assert 0 <= admit.last_token < vocab_size
            self._last_tokens[admit.slot].fill_(admit.last_token)  # on CUDA, an assignment waits for the device

    def _constraint(self, admit: Admit) -> OutputConstraint | None:
        params = admit.sampling
        if not params.grammar and params.thinking is None:
            return None
        assert len(admit.history) >= admit.prompt_len, "a request with a grammar came without its tokens"
        # None too if its request has ended and the grammar was forgotten: its row is ignored then.
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
        assert all(0 <= page < self.num_pages for page in delta.pages), "a page outside the pool"
        self._page_table[delta.slot, delta.first : end] = delta.pages
        slot.num_pages = max(end, slot.num_pages)

    def _append_window_pages(self, delta: PageDelta) -> None:
        end, slot = delta.first + len(delta.pages), self._slot(delta.slot)
        assert self._window_table is not None
        assert 0 <= delta.first <= slot.num_window_pages, f"a gap in the window pages of slot {delta.slot}"
        assert all(0 <= page < self.pool.num_window_pages for page in delta.pages), "a window page outside the pool"
        self._window_table[delta.slot, delta.first : end] = delta.pages
        slot.num_window_pages = max(end, slot.num_window_pages)

    def _extend(self, plan: StepPlan) -> PendingStep:
        rows = plan.rows
        copies = HostCopies(self.pool.device)
        if not rows:
            return PendingStep(plan.step, copies)
        sampled = [row for row in rows if row.sample]
        with_targets = [row for row in rows if row.targets]
        awaits_tokens = not all(unread.step.is_done for unread in self._unread)
        masks = None if awaits_tokens else self._begin_masks(sampled)  # on another thread, while the model computes
        logits, before_targets = self._compute(rows, len(sampled))
        if awaits_tokens:  # the device has this step's model to compute by now
            masks = self._begin_masks(sampled)
        tokens = self._sample(sampled, logits, masks)
        logprobs = self._prompt_logprobs(with_targets, before_targets)
        step = PendingStep(
            plan.step,
            copies,
            sampled=None if tokens is None else tokens.copied(copies),
            prompt_logprobs=[part.copied(copies) for part in logprobs],
            num_targets=[len(row.targets) for row in with_targets],
        )
        copies.end()
        slots = {index: slot for index, row in enumerate(sampled) if (slot := self._slot(row.slot)).depends_on_tokens}
        if slots:
            self._unread.append(UnreadTokens(step, slots))
        return step

    def _compute(self, rows: tuple[Row, ...], num_sampled: int) -> tuple[Tensor, Tensor]:
        """Launch the model; return the logits of each row that samples, and hidden states before the rows' targets."""
        self._check(rows)
        adapters = [self._slot(row.slot).adapter for row in rows]
        has_adapters = any(adapters)
        if (
            self._graphs is not None
            and not has_adapters
            and self._graphs.fits(len(rows))
            and all(map(_is_decode, rows))
        ):
            slots, positions = [row.slot for row in rows], [row.start for row in rows]
            pages = self._page_table[slots, [start // self._page_size for start in positions]]
            logits = self._graphs.launch(slots, positions, pages.tolist())
            return logits, logits[:0]
        hidden = self._hidden_states(rows, adapters if has_adapters else None)
        logits = self.model.logits(hidden[:num_sampled]) if num_sampled else hidden[:0]
        return logits, hidden[num_sampled:]

    def _hidden_states(self, rows: tuple[Row, ...], of_row: Sequence[LoraWeights | None] | None) -> Tensor:
        """Return the hidden states of each row that samples, then those of the positions before the rows' targets.

        Args:
            of_row: the adapter of each row; None if none has one.
        """
        arrays = self._arrays(rows)
        batch = make_batch(arrays, self.pool.device)
        tokens = self._tokens(rows, batch.first_new)
        kept = _kept_positions(rows, batch.first_new)
        if self._ranks is not None:
            self._ranks.begin(arrays, kept, [0 if one is None else one.number for one in of_row or ()])
        keep = to_device(kept, self.pool.device)
        adapters = None if of_row is None else StepAdapters(of_row, arrays.num_new, kept, self.pool.device)
        attention = self._attention.prepare(batch)
        return self.model.hidden_states(tokens, batch.positions, attention, keep, adapters=adapters)

    def _arrays(self, rows: tuple[Row, ...]) -> RowArrays:
        slots = np.array([row.slot for row in rows])
        starts = np.array([row.start for row in rows], np.int64)
        num_new = np.array([row.num_tokens for row in rows], np.int64)
        width = self.pool.layout.num_pages(int((starts + num_new).max()))  # the table is as wide as the context
        windows = None if self._window_table is None else self._window_table[slots, :width]
        return RowArrays(starts, num_new, self._page_table[slots, :width], self._page_size, windows)

    def _read_tokens(self) -> None:
        """Append the tokens of earlier steps to the slots whose next tokens depend on them; waits for these steps."""
        for step, slots in self._unread:
            tokens = step.tokens()
            for index, slot in slots.items():
                slot.append(tokens[index])
        self._unread.clear()

    def _begin_masks(self, rows: Sequence[Row]) -> "Future[StepMasks] | None":
        """Begin to find the masks of rows with constraints, which depend on the tokens of earlier steps."""
        self._read_tokens()
        masked = []
        for index, row in enumerate(rows):
            slot = self._slot(row.slot)
            if slot.constraint is not None and slot.constraint.is_active:
                num_output = row.start + row.num_tokens - slot.prompt_len
                late_ids = slot.end_ids if num_output < slot.sampling.min_tokens else ()
                masked.append(MaskedRow(index, slot.constraint, late_ids))
        return self._masks.begin(masked) if masked else None

    def _sample(
        self, rows: Sequence[Row], logits: Tensor, pending: "Future[StepMasks] | None"
    ) -> SampledTensors | None:
        """Sample one token per row from the logits ``[len(rows), vocab]`` after their last positions."""
        if not rows:
            return None
        sampling_rows = [self._sampling_row(row) for row in rows]
        masks = None if pending is None else pending.result()
        tokens, logprobs = sample(logits, sampling_rows, masks)
        self._last_tokens[self._indices([row.slot for row in rows])] = tokens
        asked = [index for index, row in enumerate(sampling_rows) if row.params.logprobs is not None]
        if masks is None:
            return SampledTensors(tokens, logprobs, asked)
        for index in masks.failures:
            self._grammars.renew(sampling_rows[index].params.grammar)
        is_blocked = torch.isneginf(logits.gather(1, tokens[:, None]))[:, 0]
        return SampledTensors(tokens, logprobs, asked, is_blocked, masks.failures)

    def _prompt_logprobs(self, rows: Sequence[Row], hidden: Tensor) -> list[LogprobTensors]:
        """Return the log-probabilities of each row's targets from the hidden states of the positions before them."""
        if not rows:
            return []
        tokens = [token for row in rows for token in row.targets]
        num_top = [self._slot(row.slot).sampling.logprobs or 0 for row in rows for _ in row.targets]
        return prompt_logprobs(hidden, self.model.logits, tokens, num_top)

    def _indices(self, numbers: Sequence[int]) -> Tensor:
        return to_device(np.array(numbers, np.int64), self.pool.device)

    def _check(self, rows: tuple[Row, ...]) -> None:
        assert len({row.slot for row in rows}) == len(rows), "a slot has two rows in one step"
        for row in rows:
            assert row.start >= 0
            assert row.num_tokens > 0
            room = self._slot(row.slot).num_pages * self._page_size
            assert row.start + row.num_tokens <= room, f"slot {row.slot} has no page for its last token"
            if self._window_table is not None:
                room = self._slot(row.slot).num_window_pages * self._page_size
                assert row.start + row.num_tokens <= room, f"slot {row.slot} has no window page for its last token"
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
        tokens = to_device(named, self.pool.device)
        if unnamed:
            slots = self._indices([rows[index].slot for index in unnamed])
            tokens[to_device(first_new[unnamed], self.pool.device)] = self._last_tokens[slots]
        return tokens

    def _sampling_row(self, row: Row) -> SamplingRow:
        slot = self._slot(row.slot)
        constraint = slot.constraint
        is_masked = constraint is not None and constraint.is_active  # then the mask heeds min_tokens
        end_ids = () if is_masked else slot.end_ids
        position = row.start + row.num_tokens
        is_early = position - slot.prompt_len < slot.sampling.min_tokens
        must_go_on = constraint is not None and constraint.has_answer_to_come and not is_early
        if must_go_on:  # the request's own stop tokens end its reasoning
            end_ids = tuple([token for token in end_ids if token not in slot.sampling.stop_token_ids])
        return SamplingRow(slot.sampling, position, slot.prompt_len, end_ids, slot.history, slot.mask, must_go_on)


def _is_decode(row: Row) -> bool:
    """Whether a row extends its request by the token sampled last, and samples the next one."""
    return row.tokens is None and row.sample and not row.targets


def _kept_positions(rows: Sequence[Row], first_new: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return indices of packed tokens: the last of each row that samples, then the tokens before each row's targets."""
    lasts = [first_new[index + 1] - 1 for index, row in enumerate(rows) if row.sample]
    before_targets = [
        first_new[index] + row.first_target + np.arange(len(row.targets))
        for index, row in enumerate(rows)
        if row.targets
    ]
    return np.concatenate([np.array(lasts, np.int64), *before_targets])
