"""The Triton backend splits keys, keeps its grid, chooses tiles, and compiles for GPUs that this machine lacks."""

import importlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.attention_steps import Build, compare, make_params, make_step
from support.engine.devices import DEVICES
from support.engine.recorded_launches import record_launches

from common.cache.page_layout import PageLayout
from common.engine.attention import make_attention, resolve_attention
from common.engine.attention.protocol import AttentionParams
from common.engine.batch import RowArrays, make_batch
from common.engine.kv_pool import KVPool
from common.engine.triton_kernels import has_interpreter
from common.engine.triton_kernels.tiles import (
    SAMPLING,
    SHARED_BYTES,
    SamplingTile,
    Tile,
    TileShape,
    choose_tile,
    default_tile,
    heads_of_a_program,
    shared_bytes_of,
    store_tiles,
    stored_sampling_tile,
    stored_tiles,
    tiles_file,
)
from common.errors import ConfigError

ROOT = Path(__file__).parents[3]
LAYOUT = PageLayout(1, 2, 16, 16, "float32")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

if not find_spec("triton"):
    pytest.skip("needs triton", allow_module_level=True)


def with_programs(num_programs: int) -> Build:
    """Build a backend that splits keys until so many programs run, with small tiles."""
    from common.engine.attention.triton_backend import TritonAttention

    small = Tile(16, 64, 4, 1)

    def build(pool: KVPool, num_heads: int, params: tuple[AttentionParams, ...]) -> TritonAttention:
        shapes = [
            TileShape(is_decode, pool.layer(0).keys.dtype, pool.layout.head_dim, num_heads // pool.layout.num_kv_heads)
            for is_decode in (False, True)
        ]
        tiles = {shape.name: small for shape in shapes}
        return TritonAttention(pool, num_heads, params, num_programs=num_programs, tiles=tiles)

    return build


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_programs", [1, 32])
@pytest.mark.parametrize(
    "params",
    [{}, {"window": 50}, {"has_sinks": True}, {"soft_cap": 2.0, "window": 300, "has_sinks": True}],
    ids=["plain", "window", "sinks", "all"],
)
def test_rows_of_any_length_are_merged_from_splits(params: dict[str, object], num_programs: int, device: str) -> None:
    """Rows end in the first split and in the last; a window leaves most splits empty; a prompt has a long prefix."""
    for rows in ([(5, 1), (530, 1), (0, 1)], [(400, 12)]):
        heads = (3, 1, 24)
        made = make_params(heads[0], device, **params)  # type: ignore[arg-type]
        compare(with_programs(num_programs), device, "float32", rows, 16, heads, made, spare_pages=64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "format", [{"value_dim": 40}, {"dtype": "fp8_e4m3", "value_dim": 16, "is_latent": True}], ids=["wide", "latent"]
)
def test_splits_are_merged_in_other_formats_of_pages(format: dict[str, object], device: str) -> None:
    dtype = "float16" if device == "cuda" else "float32"
    build = with_programs(4)
    compare(build, device, dtype, [(5, 1), (300, 1)], 16, (2, 1, 24), spare_pages=64, format=format)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_far_behind_the_first_are_found(device: str) -> None:
    """Offsets of their numbers do not fit into 32 bits. On a CPU the pool is a sparse file."""
    layout = PageLayout(64, 2, 16, 16, "bfloat16")
    num_pages = (1 << 32) // layout.page_bytes + 2
    found = []
    for first in (0, num_pages - 2):
        pool = KVPool(layout, num_pages, device)
        backend = with_programs(1)(pool, 4, (AttentionParams(),) * 64)
        table = np.array([[first, first + 1]], np.int32)
        torch.manual_seed(0)
        for start, num_new in ((0, 20), (20, 2)):
            batch = make_batch(RowArrays(np.array([start]), np.array([num_new]), table, 16), pool.device)
            step, qkv = backend.prepare(batch), torch.randn(num_new, 8, 16).to(pool.device, torch.bfloat16)
            if start == 0:
                found.append(step.extend(63, *qkv.split([4, 2, 2], dim=1)))
            else:
                rotary = torch.rand(2, num_new, 8).to(pool.device)
                found.append(step.rotate_and_extend(63, qkv, None, (rotary[0], rotary[1]), 1e-6))
        pool.close()
    near, far = found[:2], found[2:]
    assert all(part.isfinite().all() and part.any() for part in near)
    assert all(torch.equal(*pair) for pair in zip(near, far, strict=True))


def test_the_number_of_splits_depends_on_the_number_of_pieces_not_on_their_lengths() -> None:
    pool = KVPool(LAYOUT, 256)
    backend = with_programs(264)(pool, 4, (AttentionParams(),))
    decode, extend = (partial(backend.num_splits, is_decode=is_decode) for is_decode in (True, False))
    assert decode(num_pieces=1, max_tokens=1 << 20) == 64, "264 programs on 2 KV heads; 64 at most"
    assert decode(num_pieces=33, max_tokens=1 << 20) == 4
    assert decode(num_pieces=200, max_tokens=1 << 20) == 1
    assert decode(num_pieces=1, max_tokens=1023) == 2, "no split has fewer than 256 of the keys"
    assert extend(num_pieces=33, max_tokens=1 << 20) == 2, "132 programs"
    assert extend(num_pieces=34, max_tokens=1 << 20) == 1
    pool.close()


def test_a_decode_step_has_the_same_launches_whatever_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    from common.engine.attention import triton_backend

    launches = record_launches(monkeypatch, triton_backend, ("write_kv", "paged_attention", "merge_splits"))
    pool = KVPool(LAYOUT, 256)
    backend = with_programs(32)(pool, 4, (AttentionParams(),))
    seen = []
    for rows in ([(3, 1), (9, 1)], [(2000, 1), (0, 1)]):
        launches.clear()
        qkv = torch.zeros(2, 8, 16).split([4, 2, 2], dim=1)
        backend.prepare(make_step(rows, 16, 256, "cpu", 0)).extend(0, *qkv)
        seen.append(list(launches))
    assert seen[0] == seen[1] == [("write_kv", (2,)), ("paged_attention", (2, 2, 8)), ("merge_splits", (2, 2, 1))]
    pool.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_piece_without_tokens_is_skipped(device: str) -> None:
    """A batch that is padded to a bucket's size has such pieces: their row, table and output are never touched."""
    pool = KVPool(LAYOUT, 64, device)
    backend = with_programs(32)(pool, 4, (AttentionParams(),))
    step = backend.prepare(make_step([(3, 1), (40, 1)], 16, 64, device, 0))
    step._passes[0]._pieces[1] = torch.tensor([1 << 40, 1 << 40, 0, 0])
    q, out = torch.ones(2, 4, 16, device=device), torch.full((2, 4, 16), 7.0, device=device)
    step._passes[0].attend(0, q, out)
    assert sorted((out == 7.0).all(dim=(1, 2)).tolist()) == [False, True]
    pool.close()


# ---- tiles -----------------------------------------------------------------------------------------------------------


@given(
    is_decode=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    head_dim=st.integers(1, 256),
    group=st.integers(1, 64),
    shared_bytes=st.sampled_from([SHARED_BYTES, 227 << 10]),
)
def test_default_tiles_hold_one_token_and_fit_into_shared_memory(
    is_decode: bool, dtype: torch.dtype, head_dim: int, group: int, shared_bytes: int
) -> None:
    shape = TileShape(is_decode, dtype, head_dim, group)
    tile = default_tile(shape, shared_bytes)
    assert tile.block_m >= group
    width = 1 << (head_dim - 1).bit_length()
    assert (tile.block_m + 2 * tile.num_stages * tile.block_n) * width * dtype.itemsize <= shared_bytes


def test_wide_values_divide_the_query_heads_of_a_kv_head_among_programs() -> None:
    """A program has as many heads as leave registers for their sums: 8,192 numbers."""
    assert heads_of_a_program(group=8, value_dim=128) == 8
    assert heads_of_a_program(group=128, value_dim=512) == 16
    assert heads_of_a_program(group=24, value_dim=512) == 12, "a divisor of the group"
    latent = TileShape(True, torch.bfloat16, 576, 16, value_dim=512)
    assert latent.row_bytes == 2 * (512 + 64)
    assert TileShape(True, torch.float8_e4m3fn, 128, 4).row_bytes == 256, "16 bits while they are computed"
    assert latent.name == "decode bfloat16 head_dim=576 group=16 value_dim=512"


def test_measured_tiles_are_kept_by_device_and_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decode = TileShape(True, torch.bfloat16, 128, 4)
    assert choose_tile(decode, stored_tiles("GPU X1")) == default_tile(decode)
    measured = Tile(16, 128, 8, 3)
    store_tiles("GPU X1", {decode.name: measured})
    store_tiles("GPU X1", {TileShape(False, torch.bfloat16, 128, 4).name: Tile(64, 64, 4, 2)})
    assert choose_tile(decode, stored_tiles("GPU X1")) == measured
    assert stored_tiles("GPU X2") == {}
    assert list(json.loads(tiles_file("GPU X1").read_text())) == [
        "decode bfloat16 head_dim=128 group=4",
        "extend bfloat16 head_dim=128 group=4",
    ]


def test_the_measured_tile_of_sampling_is_kept_beside_those_of_attention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored_sampling_tile("GPU") == SamplingTile()
    shape = TileShape(True, torch.bfloat16, 128, 4)
    measured, of_sampling = Tile(16, 128, 8, 3), SamplingTile(1024, 8192, 16)
    store_tiles("GPU", {SAMPLING: of_sampling})
    store_tiles("GPU", {shape.name: measured})
    assert stored_sampling_tile("GPU") == of_sampling
    assert stored_tiles("GPU") == {shape.name: measured}
    with pytest.raises(ValueError, match="power of two"):
        SamplingTile(block=1000)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"block_m": 17}}', '{"a": {"block_m": 8}}'])
def test_a_damaged_file_of_tiles_counts_as_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiles_file("GPU").parent.mkdir(parents=True)
    tiles_file("GPU").write_text(text)
    assert stored_tiles("GPU") == {}
    assert "tile" in caplog.text


def test_a_measured_tile_with_too_few_lines_for_the_heads_is_not_used() -> None:
    shape = TileShape(True, torch.bfloat16, 128, 32)
    assert choose_tile(shape, {shape.name: Tile(16, 64, 4, 2)}).block_m == 32


# ---- choice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler"),
        subprocess.CalledProcessError(1, "gcc"),
        PermissionError("/x"),
        AssertionError("libcuda.so cannot found!"),
        ImportError("cuda_utils.so: failed to map segment from shared object"),
    ],
)
def test_a_machine_on_which_triton_cannot_compile_is_told_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Driver:
        @property
        def active(self) -> None:
            raise error

    module = importlib.import_module("triton.runtime.driver")  # ``triton.runtime.driver`` is the object in it
    monkeypatch.setattr(module, "driver", Driver())
    needs = "it needs a C compiler, the headers of Python .*, libcuda.*, and a folder .* executed"
    with pytest.raises(ConfigError, match=rf"\({re.escape(str(error))}\): {needs}"):
        shared_bytes_of(torch.device("cuda", 0))


def test_auto_takes_triton_on_cuda_and_torch_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_attention("auto", CUDA, LAYOUT) == "triton"
    assert resolve_attention("auto", CPU, LAYOUT) == "cpu"
    monkeypatch.setattr("common.engine.attention.find_spec", lambda _: None)
    assert resolve_attention("auto", CUDA, LAYOUT) == "torch"
    with pytest.raises(ConfigError, match=r"--attention-backend triton: the package triton is missing"):
        resolve_attention("triton", CUDA, LAYOUT)


def test_auto_takes_torch_on_a_gpu_that_is_older_than_triton_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.attention._capability", lambda _: (7, 5))
    assert resolve_attention("auto", CUDA, LAYOUT) == "torch"
    with pytest.raises(ConfigError, match=r"--attention-backend triton: needs a GPU of compute capability 8\.0"):
        resolve_attention("triton", CUDA, LAYOUT)
    monkeypatch.setattr("common.engine.attention._capability", lambda _: (8, 0))
    assert resolve_attention("auto", CUDA, LAYOUT) == "triton"


def test_triton_on_the_cpu_is_refused_outside_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match=r"--attention-backend triton: runs on CUDA"):
        resolve_attention("triton", CPU, LAYOUT)


@pytest.mark.skipif(not has_interpreter(), reason="the interpreter was not chosen")
def test_the_backend_is_chosen_by_name() -> None:
    pool = KVPool(LAYOUT, 2)
    assert type(make_attention("triton", pool, 2)).__name__ == "TritonAttention"
    pool.close()


# ---- compilation -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_compile_for_gpus_with_hardly_a_spilled_register(capability: int, tmp_path: Path) -> None:
    """Triton's package has NVIDIA's assembler, so that machine code is made without a GPU; nothing is launched."""
    script = ROOT / "tests/support/engine/compile_triton_kernels.py"
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    command = [sys.executable, str(script), str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    operations = {"add_rms_norm", "norm_and_rotate", "silu_and_multiply"}
    sampling = {"find_maxima", "weigh_blocks", "gather_likely", "draw"}
    attention = {"write_kv", "paged_attention", "merge_splits"}
    assert {kernel["name"] for kernel in kernels} == operations | sampling | attention | {"copy_runs", "grouped_linear"}
    assert not any(kernel["is_fused"] for kernel in kernels if kernel["name"] in sampling), "draws may differ"
    for kernel in kernels:
        assert kernel["shared_bytes"] <= (227 if capability in (90, 100) else 99) << 10, kernel
        assert kernel["stack_bytes"] <= (160 if capability == 120 else 128), kernel  # spilled registers
    assert np.all([kernel["code_bytes"] > 0 for kernel in kernels])
