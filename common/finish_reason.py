"""Decides when an output ends. Both roles use this rule, since either may sample the last token."""

from collections.abc import Collection
from typing import Literal

from common.sampling_params import SamplingParams

#: Empty while the output goes on.
Finish = Literal["", "stop", "length"]
#: The reasons of outputs that have ended without an error.
NORMAL_ENDS = frozenset({"stop", "length"})


def finish_reason(sampling: SamplingParams, eos_token_ids: Collection[int], *, token: int, num_output: int) -> Finish:
    """Return the reason why the output ends with ``token``, its ``num_output``-th token; empty if it goes on."""
    if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
        return "stop"
    return "length" if num_output >= sampling.max_new_tokens else ""
