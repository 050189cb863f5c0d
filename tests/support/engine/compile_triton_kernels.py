"""Compiles the Triton kernels for a GPU that need not be there, with the arguments of real steps, and launches nothing.

Usage: ``compile_triton_kernels.py CAPABILITY`` with ``TRITON_INTERPRET=0``; capability 90 is that of an H100. Prints a
line of JSON for each compiled kernel.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from support.engine.attention_steps import make_step
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from common.cache.page_layout import PageLayout
from common.engine.attention.protocol import AttentionParams
from common.engine.attention.triton_backend import TritonAttention
from common.engine.kv_pool import KVPool
from common.engine.models.routing import Routing
from common.engine.triton_kernels.elementwise import TritonOperations
from common.engine.triton_kernels.grouped_linear import GroupedExperts
from common.engine.triton_kernels.pages import Runs, gather, scatter
from common.engine.triton_kernels.sampling import draw_tokens
from common.engine.triton_kernels.tiles import WIDE_TILE, Tile, TileShape

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
compile_only = JITFunction.run


class AbsentGpu:
    """The part of Triton's driver that compilation asks."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    compiled = compile_only(kernel, *args, grid=grid, warmup=True, **options)
    code = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = [int(size) for size in re.findall(r"STACK:(\d+)", usage)]
    shared = compiled.metadata.shared
    found = {"name": kernel.fn.__name__, "shared_bytes": shared, "stack_bytes": max(stack), "code_bytes": len(code)}
    found["is_fused"] = "fma." in compiled.asm["ptx"] or compiled.metadata.enable_fp_fusion
    print(json.dumps(found))
    return compiled


def compile_attention(num_heads: int, layout: PageLayout, prompt_tile: Tile | None = None) -> None:
    """Two layers, plain and with all parameters; a long prompt, and a decode row whose keys are split."""
    shape = TileShape(False, torch.bfloat16, layout.head_dim, num_heads // layout.num_kv_heads)
    tiles = {shape.name: prompt_tile} if prompt_tile else {}
    pool = KVPool(layout, 4096 // layout.page_size)
    page_size = layout.page_size
    params = (AttentionParams(), AttentionParams(window=100, soft_cap=5.0, sinks=torch.zeros(num_heads)))
    step = TritonAttention(pool, num_heads, params, num_programs=264, tiles=tiles).prepare(
        make_step([(37, 1), (300, 170)], page_size, pool.num_pages, "cpu", seed=0)
    )
    counts = (num_heads, layout.num_kv_heads, layout.num_kv_heads)
    dims = (layout.head_dim, layout.head_dim, layout.value_dim)
    q, k, v = (torch.zeros(171, *shape, dtype=torch.bfloat16) for shape in zip(counts, dims, strict=True))
    for layer in range(2):
        step.extend(layer, q, k, v)
    if step.can_rotate:
        qkv = torch.zeros(171, sum(counts), layout.head_dim, dtype=torch.bfloat16)
        rotary = (torch.ones(171, layout.head_dim // 2), torch.zeros(171, layout.head_dim // 2))
        norm = torch.ones(layout.head_dim, dtype=qkv.dtype)
        for layer in range(2):
            step.rotate_and_extend(layer, qkv, (norm, norm), rotary, 1e-6)
    pool.close()


def compile_operations(num_heads: int, num_kv_heads: int, head_dim: int, hidden: int) -> None:
    operations = TritonOperations()
    x, weight = torch.zeros(3, hidden, dtype=torch.bfloat16), torch.ones(hidden, dtype=torch.bfloat16)
    operations.add_rms_norm(x, None, weight, 1e-6)
    operations.add_rms_norm(x, x, weight, 1e-6)
    qkv = torch.zeros(3, num_heads + 2 * num_kv_heads, head_dim, dtype=torch.bfloat16)
    rotary = (torch.ones(3, head_dim // 2), torch.zeros(3, head_dim // 2))
    norm = torch.ones(head_dim, dtype=torch.bfloat16)
    operations.norm_and_rotate(qkv, num_heads, None, rotary, 1e-6)
    operations.norm_and_rotate(qkv, num_heads, (norm, norm), rotary, 1e-6)
    operations.silu_and_multiply(torch.zeros(3, 6 * hidden, dtype=torch.bfloat16))


def compile_experts(hidden: int, width: int, num_experts: int, num_per_token: int) -> None:
    """A step of few tokens, and one of many."""
    gate_up = torch.zeros(num_experts, 2 * width, hidden, dtype=torch.bfloat16)
    experts = GroupedExperts(gate_up, torch.zeros(num_experts, hidden, width, dtype=torch.bfloat16))
    for num_tokens in (3, 64 * num_experts // num_per_token):
        chosen = torch.arange(num_tokens * num_per_token).view(num_tokens, -1) % num_experts
        routing = Routing(chosen, torch.ones(chosen.shape))
        experts(torch.zeros(num_tokens, hidden, dtype=torch.bfloat16), routing, TritonOperations())


if __name__ == "__main__":
    driver.set_active(AbsentGpu())  # type: ignore[arg-type]
    JITFunction.run = run  # type: ignore[method-assign]
    compile_attention(32, PageLayout(2, 8, 128, 16, "bfloat16"))
    compile_attention(32, PageLayout(2, 8, 128, 16, "fp8_e4m3"))
    if int(sys.argv[1]) in (90, 100):  # the GPUs whose memory has room for it
        compile_attention(32, PageLayout(2, 8, 128, 16, "bfloat16"), WIDE_TILE)
    compile_attention(16, PageLayout(2, 16, 192, 16, "bfloat16", value_dim=128))
    compile_attention(128, PageLayout(2, 1, 576, 16, "bfloat16", value_dim=512, is_latent=True))
    compile_operations(32, 8, 128, 4096)
    compile_experts(256, 96, 8, 2)
    runs = Runs.make(((4096, 512), (8192, 512)), 1 << 16, torch.device("cpu"))
    for copy in (gather, scatter):
        copy(torch.zeros(4, 1 << 16, dtype=torch.uint8), torch.tensor([2]), runs, torch.zeros(1024, dtype=torch.uint8))
    draw_tokens(torch.zeros(3, 151_936), torch.zeros(5, 3, dtype=torch.float64))
