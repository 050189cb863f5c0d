"""Takes tokens out of the choice: by ``allowed_token_ids``, ``bad_words``, and end tokens before ``min_tokens``.

A masked token's logit is minus infinity. As in vLLM, ``allowed_token_ids`` leaves nothing but the ids that it lists, so
that an end token must be listed to be sampled; and the last token of a bad word is masked while the output, without
the prompt, ends with the tokens before it.

A row never loses all its tokens: where the masks together would leave none, ``bad_words`` gives way, and if that does
not suffice, ``min_tokens``; ``allowed_token_ids`` always holds.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.engine.device_copies import to_device
from common.sampling_params import SamplingParams

Ids = NDArray[np.int64]


class TokenMask:
    """The allowed tokens and bad words of one request, and the end of its output.

    The end of the output follows from the tokens alone, so that a mask can be rebuilt on another node.

    Args:
        tokens: all tokens so far, prompt and output; needed only with bad words.
        prompt_len: number of them that are the prompt.
        vocab_size: ids from here on are ignored.
    """

    def __init__(self, params: SamplingParams, tokens: Sequence[int], *, prompt_len: int, vocab_size: int) -> None:
        assert len(tokens) >= prompt_len or not params.bad_words, "a request with bad words came without its tokens"
        allowed = [token for token in dict.fromkeys(params.allowed_token_ids) if 0 <= token < vocab_size]
        assert allowed or not params.allowed_token_ids, "allowed_token_ids has no id of the vocabulary"
        self.allowed: Ids = np.array(allowed, np.int64)
        self._allowed_ids = frozenset(allowed)
        self._vocab_size = vocab_size
        #: Bad words without their last token, and their last token, by the token before the last; None: one token.
        self._words: dict[int | None, list[tuple[tuple[int, ...], int]]] = {}
        for *head, last in params.bad_words:
            if 0 <= last < vocab_size:
                self._words.setdefault(head[-1] if head else None, []).append((tuple(head), last))
        self._tail_length = max((len(word) - 1 for word in params.bad_words), default=0)
        self._tail = tuple(tokens[max(prompt_len, len(tokens) - self._tail_length) :])

    @property
    def depends_on_tokens(self) -> bool:
        """Whether the masked tokens depend on the output so far: those of bad words of several tokens do."""
        return self._tail_length > 0

    def append(self, token: int) -> None:
        """Add a sampled token to the output."""
        if self._tail_length:
            self._tail = (*self._tail, token)[-self._tail_length :]

    def banned(self, end_ids: Iterable[int] = ()) -> set[int]:
        """Return the tokens to mask beside those that are not allowed.

        Args:
            end_ids: end tokens that must not be sampled yet.
        """
        ends = set(end_ids)
        return next((found for found in (ends | self._ends_of_bad_words(), ends) if self._leaves_some(found)), set())

    def _ends_of_bad_words(self) -> set[int]:
        """Return the tokens that would complete a bad word now."""
        words = self._words.get(None, []) + (self._words.get(self._tail[-1], []) if self._tail else [])
        return {last for head, last in words if self._tail[len(self._tail) - len(head) :] == head}

    def _leaves_some(self, banned: set[int]) -> bool:
        return not self._allowed_ids <= banned if self._allowed_ids else len(banned) < self._vocab_size


def apply_token_masks(logits: Tensor, rows: Sequence[tuple[TokenMask | None, Sequence[int]]]) -> None:
    """Set the logits of masked tokens to minus infinity, in place.

    On CUDA, ``index_fill_`` launches at once, whereas an assignment of a number by indices waits for the device.

    Args:
        logits: ``[R, vocab]`` float32, contiguous.
        rows: the mask of each row, and the end tokens that it must not sample yet.
    """
    width = logits.shape[1]
    limited: list[int] = []
    kept: list[Ids] = []
    masked: list[Ids] = []
    for row, (mask, end_ids) in enumerate(rows):
        if mask is not None and len(mask.allowed):
            limited.append(row)
            kept.append(row * width + mask.allowed)
        banned = mask.banned(end_ids) if mask is not None else end_ids
        if 0 < len(banned) < width:
            masked.append(row * width + np.array([*banned], np.int64))
    flat = logits.view(-1)
    if limited:
        places = _places(kept, logits)
        values = flat[places]
        logits.index_fill_(0, to_device(np.array(limited, np.int64), logits.device), -math.inf)
        flat[places] = values
    if masked:
        flat.index_fill_(0, _places(masked, logits), -math.inf)


def _places(parts: Sequence[Ids], logits: Tensor) -> Tensor:
    return to_device(np.concatenate(parts), logits.device)
