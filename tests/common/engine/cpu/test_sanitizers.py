"""The kernels read and write no byte outside of their tensors, and leave nothing to undefined behaviour of C."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine.native_targets import SANITIZED

from common.engine.cpu.targets import Target

ROOT = Path(__file__).parents[4]

PROGRAM = '''
import ctypes, itertools, os, pathlib, sys
from dataclasses import replace

import numpy as np
import torch
from support.engine.native_targets import SANITIZED

from common.cache.page_layout import PageLayout
from common.engine.attention.cpu import CpuAttention
from common.engine.attention.protocol import AttentionParams
from common.engine.batch import RowArrays, make_batch
from common.engine.cpu.compile_native import build_library
from common.engine.cpu.huge_pages import HugePages
from common.engine.cpu.kernels import Kernels, library_for
from common.engine.kv_pool import TORCH_DTYPES, layer_views
from common.engine.models import layers, linear
from common.engine.models.config import ModelConfig, RopeConfig
from common.engine.models.decoder import Decoder, allocate_weights
from common.engine.models.quantization import QuantizedWeight

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
optimized = library_for(next(target for target in SANITIZED if target.name == sys.argv[1]))
library = replace(
    optimized,
    name="sanitized",
    flags=(*optimized.flags, "-Og", "-g1", *SANITIZERS),
    libraries=("-lm", "-lasan", "-lubsan"),
)
del os.environ["LD_PRELOAD"]  # the compiler needs none
kernels = Kernels(ctypes.CDLL(str(build_library(library))))
torch.manual_seed(0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Exact(HugePages):
    """Tensors whose ends the sanitizer knows."""

    def empty(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)


class ExactPool:
    """A pool whose ends the sanitizer knows."""

    def __init__(self, layout, num_pages):
        self.layout = layout
        if layout.dtype == "int8":  # scales too, from 2 ** -17 on
            self._pages = torch.randint(110, 128, (num_pages, layout.page_bytes), dtype=torch.uint8)
        else:
            dtype = TORCH_DTYPES[layout.dtype]
            self._pages = torch.randn(num_pages, layout.page_bytes // dtype.itemsize).to(dtype).view(torch.uint8)

    def layer(self, index):
        return layer_views(self._pages, self.layout, index)


for dtype, rows in itertools.product(DTYPES, (1, 5, 19)):
    x, delta, weight = torch.randn(rows, 48).to(dtype), torch.randn(rows, 48).to(dtype), torch.rand(48).to(dtype)
    kernels.add_rms_norm(x, delta, weight, 1e-6)
    kernels.silu_and_multiply(torch.randn(rows, 96).to(dtype))
    norms, angles = (torch.rand(32).to(dtype), torch.rand(32).to(dtype)), torch.rand(rows, 16)
    kernels.norm_and_rotate(torch.randn(rows, 5, 32).to(dtype), 3, norms, (angles.cos(), angles.sin()), 1e-6)
    for outputs, inputs, bits in itertools.product((16, 32, 48, 112), (32, 96, 128), (4, 8)):
        groups = 1 if bits == 8 else inputs // 32
        weight = QuantizedWeight(
            torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8),
            torch.rand(outputs, groups),
            torch.full((outputs, groups), 2 ** (bits - 1), dtype=torch.uint8),
            bits,
        )
        bias = torch.randn(outputs).to(dtype)
        if kernels.can_multiply_quantized(weight):
            packed = kernels.pack_quantized(weight, bias, Exact())
            kernels.linear_quantized(torch.randn(rows, inputs).to(dtype), packed, dtype)
        plain = torch.randn(outputs, inputs).to(dtype)
        if kernels.can_multiply(plain):
            packed = kernels.pack_linear(plain, Exact())
            kernels.linear(torch.randn(rows, inputs).to(dtype), packed, bias, torch.float32)
            kernels.linear(torch.randn(rows, inputs).to(dtype), packed, None, dtype)
            kernels.linear(torch.randn(1, 9 * inputs).to(dtype)[:, :inputs], packed, None, dtype)

for dtype, rows, inputs in ((torch.float32, 5, 17), *itertools.product(DTYPES, (2, 3, 401), (34, 256))):
    plain = torch.randn(64, inputs).to(dtype)
    if kernels.can_multiply(plain):
        kernels.linear(torch.randn(rows, inputs).to(dtype), kernels.pack_linear(plain, Exact()), None, torch.float32)

SHAPES = ((4, 2, 32), (8, 1, 128), (3, 3, 16), (16, 1, 256), (6, 1, 64), (36, 1, 32))
for (dtype, pages_dtype), (heads, kv_heads, dim), page_size in itertools.product(
    [(dtype, pages) for dtype in ("float32", "bfloat16", "float16") for pages in (dtype, "int8")], SHAPES, (1, 16)
):
    starts, num_new = np.array([0, 37, 5, 300]), np.array([20, 1, 31, 33])
    pages = -(-int((starts + num_new).max()) // page_size)
    pool = ExactPool(PageLayout(1, kv_heads, dim, page_size, pages_dtype), 4 * pages)
    table = np.random.permutation(4 * pages).astype(np.int32).reshape(4, pages)
    batch = make_batch(RowArrays(starts, num_new, table, page_size), torch.device("cpu"))
    count = int(num_new.sum())
    q, k, v = (torch.randn(count, n, dim).to(TORCH_DTYPES[dtype]) for n in (heads, kv_heads, kv_heads))
    special = AttentionParams(window=21, soft_cap=30.0, sinks=torch.randn(heads))
    for params in (AttentionParams(), special):
        step = CpuAttention(pool, heads, (params,), kernels).prepare(batch)
        assert step.extend(0, q, k, v).isfinite().all()

layers.load_kernels = linear.load_kernels = lambda: kernels
linear.HugePages = lambda _: Exact()
for weight_dtype, keep in itertools.product(("auto", "int8", "int4"), (None, [], [3, 0, 3])):
    config = ModelConfig(
        folder=pathlib.Path(), num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32,
        intermediate_size=96, vocab_size=48, context_length=512, rms_norm_eps=1e-6, rope=RopeConfig(1e4),
        has_qk_norm=True, has_qkv_bias=True, has_o_bias=True, has_mlp_bias=True, is_tied=True, dtype="bfloat16",
        eos_token_ids=(), generation={}, digest="",
    )
    weights, tensors = allocate_weights(config, torch.bfloat16, torch.device("cpu"))
    for tensor in tensors.values():
        tensor.normal_(0, 0.3)
    for layer in weights.layers:
        for one in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down):
            one.pack(weight_dtype)
    starts, num_new = np.array([0, 37, 5]), np.array([40, 1, 2])
    batch = make_batch(RowArrays(starts, num_new, np.arange(9, dtype=np.int32).reshape(3, 3), 16), torch.device("cpu"))
    pool = ExactPool(config.layout(16, "bfloat16"), 9)
    step = CpuAttention(pool, 4, (AttentionParams(),) * 2, kernels).prepare(batch)
    kept = None if keep is None else torch.tensor(keep, dtype=torch.int64)
    model = Decoder(config, weights)
    plain = kernels.can_multiply(torch.ones(16, 2).bfloat16())
    assert (model._native is not None) == (plain if weight_dtype == "auto" else kernels.has_quantized_linear)
    with torch.inference_mode():
        assert model.hidden_states(torch.arange(43), batch.positions, step, kept).isfinite().all()

for width in (1, 16, 100):
    kernels.token_weights(torch.randn(3, width), None)
    kernels.token_weights(torch.randn(3, width), torch.zeros(3))
print("clean")
'''


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("target", SANITIZED, ids=lambda target: target.name)
def test_the_kernels_run_clean_under_the_sanitizers_for_addresses_and_undefined_behaviour(
    tmp_path: Path, target: Target
) -> None:
    compiler = os.environ.get("CC", "cc")
    runtimes = [
        subprocess.run([compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    if not all(Path(runtime).is_absolute() for runtime in runtimes):
        pytest.skip("the compiler has no sanitizers")
    # torch and the interpreter keep memory until they end, which is no concern of this test.
    environment = {
        **os.environ, "LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2",
        "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, target.name],
        capture_output=True,
        text=True,
        timeout=1500,
        cwd=ROOT,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert ended.stdout.strip() == "clean"
