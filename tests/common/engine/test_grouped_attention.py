"""Layers with pages of their own attend as layers do that share the pages of all others."""

from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
import support.engine.triton_interpreter  # noqa: F401  (makes the interpreter faster)
import torch
from numpy.typing import NDArray

from common.cache.page_layout import PageLayout
from common.cache.window_pages import LayerGroups
from common.engine.attention import make_attention
from common.engine.attention.protocol import AttentionParams
from common.engine.batch import RowArrays, make_batch
from common.engine.kv_pool import KVPool
from common.engine.triton_kernels import has_interpreter

PAGE, WINDOW, HEADS, KV_HEADS, DIM = 4, 6, 4, 2, 32
GROUPS = LayerGroups((2,), (0, 1, 3), WINDOW)
LAYOUT = PageLayout(4, KV_HEADS, DIM, PAGE, "float32")
PARAMS = tuple(AttentionParams(window=WINDOW if layer in GROUPS.windowed else None) for layer in range(4))
NUM_PAGES, NUM_WINDOW_PAGES = 16, 9
#: Tokens that each of two rows has before a step, and new ones.
STEPS = (((0, 9), (0, 3)), ((9, 6), (3, 1)), ((15, 1), (4, 5)))


def window_table(starts: NDArray[np.int64], table: NDArray[np.int32]) -> NDArray[np.int32]:
    """Window pages of the tokens that are seen from ``starts`` on; entries before them name the first of these."""
    first = np.maximum((starts - WINDOW + 1) // PAGE, 0)
    places = np.maximum(np.arange(table.shape[1]), first[:, None])
    return (places % 4 + 4 * np.arange(len(table))[:, None]).astype(np.int32) + 1


ON_A_GPU = [pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in ("torch", "triton")]


@pytest.mark.parametrize(("backend", "device"), [*product(["reference", "torch", "cpu", "triton"], ["cpu"]), *ON_A_GPU])
def test_attention_is_that_of_layers_that_share_pages(backend: str, device: str) -> None:
    if backend == "triton" and device == "cpu" and not (find_spec("triton") and has_interpreter()):
        pytest.skip("needs Triton's interpreter")
    torch.manual_seed(0)
    plain = KVPool(LAYOUT, NUM_PAGES, device)
    grouped = KVPool(LAYOUT, NUM_PAGES, device, groups=GROUPS, num_window_pages=NUM_WINDOW_PAGES)
    assert grouped.num_pages == NUM_PAGES + 3 * NUM_WINDOW_PAGES
    assert grouped.layout.page_bytes == LAYOUT.layer_bytes
    oracle = make_attention("reference", plain, HEADS, PARAMS)
    subject = make_attention(backend, grouped, HEADS, PARAMS)
    table = np.array([[7, 2, 11, 5], [1, 3, 9, 0]], np.int32)
    for rows in STEPS:
        starts, num_new = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        own = window_table(starts, table)
        batch = make_batch(RowArrays(starts, num_new, table, PAGE, own), torch.device(device))
        expected_step, step = oracle.prepare(batch), subject.prepare(batch)
        for layer in range(LAYOUT.num_layers):
            q = torch.randn(batch.num_tokens, HEADS, DIM, device=device)
            k, v = torch.randn(2, batch.num_tokens, KV_HEADS, DIM, device=device)
            expected = expected_step.extend(layer, q, k, v)
            torch.testing.assert_close(step.extend(layer, q, k, v), expected, atol=2e-5, rtol=2e-5)
    plain.close()
    grouped.close()


def test_the_layers_of_both_groups_divide_the_memory_of_the_pool() -> None:
    pool = KVPool(LAYOUT, NUM_PAGES, groups=GROUPS, num_window_pages=NUM_WINDOW_PAGES)
    for layer in range(LAYOUT.num_layers):
        views = pool.layer(layer)
        assert len(views.keys) == (NUM_WINDOW_PAGES if layer in GROUPS.windowed else NUM_PAGES)
        assert not views.keys.any(), "no other layer has written here"
        views.keys.fill_(layer + 1.0)
        views.values.fill_(layer + 1.0)
    numbers = pool.pages.view(torch.float32)
    assert (numbers[:NUM_PAGES] == 3.0).all()
    windowed = numbers[NUM_PAGES:].view(NUM_WINDOW_PAGES, 3, -1)
    assert all((windowed[:, place] == layer + 1.0).all() for place, layer in enumerate(GROUPS.windowed))
    pool.close()
