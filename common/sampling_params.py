"""How one request wants its tokens chosen.

The parameters travel once, at admission, and never change. Together with the logits, the seed and the position they
decide a token completely: whatever else is in the batch, on whichever node, before or after a retraction.
"""

from dataclasses import dataclass

#: Largest number of alternatives whose log-probabilities a request may ask for.
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, already validated and completed with the model's defaults by the gateway.

    Attributes:
        max_new_tokens: output tokens at most, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one; 0 keeps all.
        seed: 64-bit unsigned; the token at a position is a pure function of (logits, parameters, seed, position).
        stop_token_ids: a sampled token among these ends the output (after ``min_tokens``).
        ignore_eos: the model's own end tokens do not end the output.
        min_tokens: end and stop tokens cannot be sampled before this many output tokens.
        logprobs: None for none; n for the log-probability of each output token and of the n likeliest at its place; of
            the model's own distribution, before biases, penalties, temperature and cuts.
        repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else multiplied
            (CTRL, arXiv:1909.05858).
        presence_penalty: subtracted from the logits of tokens that are in the output.
        frequency_penalty: subtracted from a token's logit as often as it is in the output.
        logit_bias: (token id, addend to its logit), before everything else.
        prompt_logprobs_from: None for none; otherwise the log-probability of each prompt token from this position on,
            at least 1 (the first token follows nothing), with as many alternatives as ``logprobs`` asks for.
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

    @property
    def has_penalties(self) -> bool:
        """Whether the next token depends on which tokens came before, beyond the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural) at one output position, of the model's own distribution before anything changes it.

    Attributes:
        token: log-probability of the token that was chosen.
        top: (token id, log-probability) of the likeliest tokens, best first.
    """

    token: float
    top: tuple[tuple[int, float], ...] = ()
