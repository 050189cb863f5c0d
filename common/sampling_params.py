"""Sampling parameters of a request, and log-probabilities of its tokens.

A node gets the parameters once, at admission, and they never change. Together with the logits and the position they
determine a token, independent of the batch, of the node and of retractions.
"""

from dataclasses import dataclass
from typing import NamedTuple

#: Largest number of alternatives whose log-probabilities a request may ask for.
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning of a model before its answer, as token ids. A grammar constrains what follows it.

    Attributes:
        start_id: the token with which the output may begin its reasoning; None: the prompt has begun it already.
        end_id: the token that ends the reasoning.
        budget: tokens of reasoning after which ``end_id`` is forced; None: no limit.
        blank_ids: tokens of white space that the output may have before ``start_id``.
    """

    start_id: int | None
    end_id: int
    budget: int | None = None
    blank_ids: tuple[int, ...] = ()


class SamplingParams(NamedTuple):
    """Sampling parameters of one request, which the gateway has validated and completed with the model's defaults.

    A tuple, since the gateway makes one for each request, and a frozen dataclass takes ten times as long to make.

    Attributes:
        max_new_tokens: largest number of output tokens, at least 1.
        temperature: divides logits; 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one; 0 keeps all.
        seed: 64-bit unsigned; the token at a position is a pure function of (logits, parameters, seed, position).
        stop_token_ids: tokens that end the output (after ``min_tokens``).
        ignore_eos: the end tokens of the model do not end the output.
        min_tokens: end and stop tokens cannot be sampled before this many output tokens.
        logprobs: n asks for log-probabilities of each output token and of the n most likely tokens at its position,
            before biases, penalties, temperature, top-k, top-p and min-p; None asks for none.
        repetition_penalty: divides positive logits, and multiplies others, of tokens in prompt or output (CTRL,
            arXiv:1909.05858).
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted from a token's logit once for each time that it occurs in the output.
        logit_bias: pairs of a token id and a number that is added to its logit before anything else.
        prompt_logprobs_from: first position, at least 1, whose prompt token gets a log-probability, with as many
            alternatives as ``logprobs``; None: no prompt token does.
        allowed_token_ids: the only tokens that may be sampled, end tokens included; empty: all.
        bad_words: token sequences that the output must not contain.
        grammar: grammar in Lark syntax, as llguidance reads it, that the output follows; empty: none.
        thinking: how the reasoning before the answer begins and ends; None if a grammar and a budget do not need it.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs_from: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    thinking: Thinking | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether sampling needs the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the executor needs the tokens so far when the request gets a slot."""
        return bool(self.has_penalties or self.bad_words or self.grammar or self.thinking)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the unchanged distribution of the model.

    Attributes:
        top: (token id, log-probability) of the most likely tokens, best first.
    """

    token: float
    top: tuple[tuple[int, float], ...] = ()
