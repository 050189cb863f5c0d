"""What a prefill node has cached of a prompt once its transfer is over."""

from support.scheduling.single_nodes import PrefillNode

from common.request import Request
from common.sampling_params import SamplingParams


def test_prompts_that_begin_alike_and_were_computed_together_are_both_cached() -> None:
    node = PrefillNode(chunk=None)
    prompts = [(0, 1, 2, 3, *range(first, first + 12)) for first in (10, 30)]  # one page is too little to wait for
    for rid, prompt in zip("ab", prompts, strict=True):
        node.scheduler.submit(Request(rid, 0, prompt, SamplingParams(max_new_tokens=9)))
    assert node.step() == [("a", 16), ("b", 16)]
    assert [node.cache.match(prompt).num_tokens for prompt in prompts] == [16, 16]
    assert node.cache.num_pages == 7, "the page that both begin with is kept once"
