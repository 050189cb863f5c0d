"""The compiled kernels equal torch and run in its threads; without a compiler, torch computes instead.

They are tested as compiled for every target that this processor has.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.attention_steps import compare, make_params
from support.engine.native_targets import USABLE
from support.examples import examples
from torch.nn import functional as F

from common.cache.page_layout import PageLayout
from common.engine.attention import make_attention
from common.engine.attention.cpu import CpuAttention
from common.engine.attention.protocol import AttentionParams
from common.engine.batch import RowArrays, make_batch
from common.engine.cpu.compile_native import BuildError, Library, build_library
from common.engine.cpu.huge_pages import HugePages
from common.engine.cpu.kernels import LIBRARY, Groups, Kernels, Rows, WeightTable, load_kernels
from common.engine.cpu.targets import TARGETS, Target
from common.engine.kv_pool import KVPool
from common.engine.models.layers import TorchOperations

ROOT = Path(__file__).parents[4]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
MAX_NATIVE_LINES = 1500
dtypes = st.sampled_from(list(TOLERANCE))
num_rows = st.sampled_from([1, 2, 33, 300])


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@settings(max_examples=examples(30), deadline=None)
@given(rows=num_rows, width=st.sampled_from([16, 48, 1024]), dtype=dtypes, has_delta=st.booleans())
def test_add_rms_norm_equals_torch(
    compiled: Kernels, rows: int, width: int, dtype: torch.dtype, has_delta: bool
) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, width).to(dtype), torch.rand(width).to(dtype)
    delta = torch.randn(rows, width).to(dtype) if has_delta else None
    theirs = x.clone()
    expected = TorchOperations().add_rms_norm(theirs, delta, weight, 1e-6)
    assert_same(compiled.add_rms_norm(x, delta, weight, 1e-6), expected)
    assert torch.equal(x, theirs), "the residual stream is not rounded as in torch"


@settings(max_examples=examples(30), deadline=None)
@given(
    rows=num_rows,
    heads=st.sampled_from([(4, 2), (3, 3), (8, 1)]),
    dim=st.sampled_from([32, 64, 128]),
    dtype=dtypes,
    has_norms=st.booleans(),
)
def test_norm_and_rotate_equals_torch(
    compiled: Kernels, rows: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, has_norms: bool
) -> None:
    torch.manual_seed(rows)
    num_heads, num_kv_heads = heads
    qkv = torch.randn(rows, num_heads + 2 * num_kv_heads, dim).to(dtype)
    norms = (torch.rand(dim).to(dtype), torch.rand(dim).to(dtype)) if has_norms else None
    angles = torch.rand(rows, dim // 2) * 6
    turn = (angles.cos(), angles.sin())
    expected = TorchOperations().norm_and_rotate(qkv.clone(), num_heads, norms, turn, 1e-6)
    found = compiled.norm_and_rotate(qkv.clone(), num_heads, norms, turn, 1e-6)
    # torch rounds after the norm and after the rotation; the kernel rounds once.
    tolerance = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)
    assert torch.equal(found[:, num_heads + num_kv_heads :], qkv[:, num_heads + num_kv_heads :]), "values changed"


@settings(max_examples=examples(30), deadline=None)
@given(rows=num_rows, width=st.sampled_from([16, 80, 3072]), dtype=dtypes, scale=st.sampled_from([1.0, 30.0, 100.0]))
def test_silu_and_multiply_equals_torch_for_large_inputs_too(
    compiled: Kernels, rows: int, width: int, dtype: torch.dtype, scale: float
) -> None:
    torch.manual_seed(rows)
    gate_up = (torch.randn(rows, 2 * width) * scale).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    found = compiled.silu_and_multiply(gate_up)
    assert_same(found, expected.to(dtype))


def test_nan_is_not_rounded_to_a_number(compiled: Kernels) -> None:
    x = torch.full((1, 16), float("nan"), dtype=torch.bfloat16)
    assert compiled.add_rms_norm(x, None, torch.ones(16, dtype=torch.bfloat16), 1e-6).isnan().all()


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.one_of(st.integers(1, 19), st.sampled_from([100, 401])),
    num_in=st.sampled_from([2, 34, 256]),
    num_out=st.sampled_from([16, 48, 64, 208]),
    has_bias=st.booleans(),
    dtypes=st.sampled_from(
        [
            *((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)),
            *((torch.float16, torch.float16), (torch.float16, torch.float32), (torch.float32, torch.float32)),
        ]
    ),
)
def test_linear_equals_torch_and_no_row_depends_on_the_others(
    compiled: Kernels, rows: int, num_in: int, num_out: int, has_bias: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    torch.manual_seed(rows)
    kept, dtype = dtypes
    x, weight = torch.randn(rows, num_in).to(kept), torch.randn(num_out, num_in).to(kept)
    bias = torch.randn(num_out).to(kept) if has_bias else None
    if not compiled.can_multiply(weight):
        return  # here oneDNN multiplies weights of this format
    packed = compiled.pack_linear(weight, HugePages())
    found = compiled.linear(x, packed, bias, dtype)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5 if kept == dtype else 1e-4}[dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance * num_in**0.5, rtol=tolerance)
    alone = torch.cat([compiled.linear(row, packed, bias, dtype) for row in x.split(1)])
    assert torch.equal(found, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_in", [4096, 9728])
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_products_with_many_inputs_equal_torch(compiled: Kernels, rows: int, num_in: int, dtype: torch.dtype) -> None:
    """Some rows are multiplied after others, since not all of them fit into the cache at once."""
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, num_in).to(dtype), torch.randn(112, num_in).to(dtype)
    if not compiled.can_multiply(weight):
        pytest.skip("here oneDNN multiplies weights of this format")
    found = compiled.linear(x, compiled.pack_linear(weight, HugePages()), None, torch.float32)
    expected = F.linear(x.double(), weight.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-5 * num_in**0.5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_weight_may_be_a_view_and_torch_may_have_another_default_dtype(compiled: Kernels, dtype: torch.dtype) -> None:
    """Decoded AWQ matrices are transposed views, and transformers changes the default while it loads a model."""
    x, weight = torch.randn(7, 34).to(dtype), torch.randn(34, 48).to(dtype).T
    if not compiled.can_multiply(weight):
        pytest.skip("here oneDNN multiplies weights of this format")
    packed = compiled.pack_linear(weight, HugePages())
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = compiled.linear(x, packed, None, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, F.linear(x.float(), weight.float()), atol=1e-4, rtol=1e-4)


def test_a_weight_without_inputs_is_left_to_torch(compiled: Kernels) -> None:
    assert not compiled.can_multiply(torch.empty(16, 0))


def test_inputs_of_another_width_than_the_weight_are_refused(compiled: Kernels) -> None:
    weight = torch.randn(16, 32, dtype=torch.bfloat16)
    if not compiled.can_multiply(weight):
        pytest.skip("here oneDNN multiplies weights of this format")
    packed = compiled.pack_linear(weight, HugePages())
    groups = Groups(torch.tensor([0]), torch.tensor([2]))
    for wrong in (torch.randn(2, 30).bfloat16(), torch.randn(64, 2).bfloat16().T[:, ::2]):
        with pytest.raises(AssertionError):
            compiled.linear(wrong, packed, None, torch.float32)
        with pytest.raises(AssertionError):
            compiled.linear_grouped(wrong, WeightTable([packed]), groups, torch.float32)


@pytest.mark.parametrize("num_in", [1, 3, 15, 17])
def test_a_product_with_an_odd_number_of_inputs_is_left_to_torch_or_equals_it(compiled: Kernels, num_in: int) -> None:
    assert not compiled.can_multiply(torch.randn(16, num_in).bfloat16())
    x, weight = torch.randn(7, num_in), torch.randn(32, num_in)
    if compiled.can_multiply(weight):
        found = compiled.linear(x, compiled.pack_linear(weight, HugePages()), None, torch.float32)
        torch.testing.assert_close(found, F.linear(x, weight), atol=1e-5, rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 2, 16), (16, 8, 128), (3, 3, 64)]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_attention_equals_the_reference(
    compiled: Kernels, rows: list[tuple[int, int]], page_size: int, heads: tuple[int, int, int], dtype: str
) -> None:
    compare(
        lambda pool, num_heads, params: CpuAttention(pool, num_heads, params, compiled),
        "cpu",
        dtype,
        rows,
        page_size,
        heads,
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 600), st.one_of(st.just(1), st.integers(1, 31), st.integers(32, 80))),
        min_size=1,
        max_size=4,
    ),
    page_size=st.sampled_from([1, 3, 16, 64]),
    heads=st.sampled_from([(4, 2, 16), (6, 2, 32), (16, 8, 128), (3, 3, 64), (8, 1, 96), (16, 1, 256), (40, 2, 32)]),
    formats=st.sampled_from([(kept, pages) for kept in ("float32", "bfloat16", "float16") for pages in (kept, "int8")]),
    window=st.one_of(st.none(), st.integers(1, 40), st.sampled_from([100, 128, 257, 5000])),
    soft_cap=st.sampled_from([None, 1.5, 30.0]),
    scale=st.sampled_from([None, 0.2]),
    has_sinks=st.booleans(),
)
def test_attention_with_any_parameters_equals_the_reference(
    compiled: Kernels,
    rows: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int, int],
    formats: tuple[str, str],
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    has_sinks: bool,
) -> None:
    """Rows decode, end within tiles, and are long enough for the kernel of prompts."""
    dtype, pages = formats
    compare(
        lambda pool, num_heads, params: CpuAttention(pool, num_heads, params, compiled),
        *("cpu", dtype, rows, page_size, heads),
        make_params(heads[0], has_sinks=has_sinks, window=window, soft_cap=soft_cap, scale=scale),
        format={"dtype": pages},
        # A larger scale makes the same rounding of the dot products count more.
        tolerance={"float32": 1e-4, "int8": 2e-3}[pages] if dtype == "float32" else None,
    )


@settings(max_examples=examples(30), deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 2, 16), (16, 8, 128), (3, 3, 64), (16, 1, 256), (34, 2, 32)]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_attention_to_pages_of_int8_equals_the_reference(
    compiled: Kernels, rows: list[tuple[int, int]], page_size: int, heads: tuple[int, int, int], dtype: str
) -> None:
    """Dot products of integers round queries and weights to 16 bits."""
    compare(
        lambda pool, num_heads, params: CpuAttention(pool, num_heads, params, compiled),
        *("cpu", dtype, rows, page_size, heads),
        format={"dtype": "int8"},
        tolerance=2e-4 if dtype == "float32" else None,
    )


@pytest.mark.parametrize("window", [None, 5, 70, 290])
def test_a_long_prompt_has_the_same_attention_wherever_it_is_cut_and_beside_other_rows(window: int | None) -> None:
    kernels = load_kernels()
    if kernels is None or not kernels.has_long_attention:
        pytest.skip("this processor has neither AMX nor a dot product of bfloat16")
    pool = KVPool(PageLayout(1, 2, 64, 16, "bfloat16"), 60)
    backend = CpuAttention(pool, 6, (AttentionParams(window=window),), kernels)
    torch.manual_seed(0)
    tokens = torch.randn(420, 10, 64).bfloat16()
    tokens[:200, 8:] = 0  # a weight that is not quite 0 of a later token would show beside these values
    table = np.random.default_rng(0).permutation(60).astype(np.int32).reshape(2, 30)

    def attend(*rows: tuple[int, int]) -> torch.Tensor:
        """The attention of rows of (first, end) tokens."""
        starts, ends = np.array(rows, np.int64).T
        batch = make_batch(RowArrays(starts, ends - starts, table[: len(rows)], 16), torch.device("cpu"))
        packed = torch.cat([tokens[first:end] for first, end in rows])
        return backend.prepare(batch).extend(0, *packed.split([6, 2, 2], dim=1))

    whole = attend((0, 420))
    cut = [attend((0, 196)), attend((196, 333), (0, 40))[:137], attend((333, 420), (0, 3))[:87]]
    pool.close()
    assert torch.equal(torch.cat(cut), whole)


@pytest.mark.slow
def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    """Run both on two threads in a new process: it maps one libgomp and has one team of threads."""
    code = """if True:
        import os, re, torch
        torch.set_num_threads(2)
        from common.engine.cpu.kernels import load_kernels
        kernels = load_kernels()
        x = torch.randn(512, 1024)
        x @ torch.randn(1024, 1024)
        before = len(os.listdir("/proc/self/task"))
        kernels.add_rms_norm(x, None, torch.ones(1024), 1e-6)
        assert len(os.listdir("/proc/self/task")) == before, "the kernels started more threads"
        maps = open("/proc/self/maps").read()
        print(len(set(re.findall(r"\\S*lib(?:gomp|iomp5|omp)[^/\\s]*\\.so\\S*", maps))))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


def test_without_a_compiler_torch_computes_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    load_kernels.cache_clear()
    try:
        pool = KVPool(PageLayout(1, 1, 16, 16, "float32"), 2)
        for _ in range(2):
            assert type(make_attention("auto", pool, 1)).__name__ == "TorchAttention"
        pool.close()
    finally:
        load_kernels.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "give GCC as CC" in caplog.text and "no-such-compiler" in caplog.text


def test_without_a_home_directory_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container may run as a user without an entry in /etc/passwd."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    load_kernels.cache_clear()
    try:
        assert load_kernels() is None
    finally:
        load_kernels.cache_clear()
    assert "XDG_CACHE_HOME" in caplog.text and "home directory" in caplog.text


OLDER = [(f"-march={name}",) for name in ("x86-64", "sandybridge", "ivybridge", "bdver2")]


@pytest.mark.parametrize(
    "flags",
    [
        OLDER[0],
        *(pytest.param(flags, marks=pytest.mark.slow) for flags in OLDER[1:]),
        *(pytest.param(target.flags, marks=pytest.mark.slow) for target in TARGETS if target not in USABLE),
    ],
    ids=" ".join,
)
def test_the_kernels_can_be_compiled_for_processors_of_other_kinds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Some have AVX, F16C or FMA without AVX2. Their library has every function that is asked for."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.skip("no C compiler here")
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if flags in OLDER and version.startswith("11"):
        pytest.skip("GCC 11 has no 16-bit floats without F16C")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = ctypes.CDLL(str(build_library(replace(LIBRARY, flags=(*LIBRARY.flags, "-O1", *flags)))))
    names = set(re.findall(r"library\.(baton_\w+)", LIBRARY.sources[0].with_suffix(".py").read_text()))
    assert len(names) > 15
    assert [name for name in sorted(names) if not hasattr(library, name)] == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_kernels_can_be_compiled_with_gcc_11(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Target
) -> None:
    """It is the compiler of Ubuntu 22.04, RHEL 9 and Amazon Linux 2023."""
    if shutil.which("gcc-11") is None:
        pytest.skip("GCC 11 is not installed")
    monkeypatch.setenv("CC", "gcc-11")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ctypes.CDLL(str(build_library(replace(LIBRARY, flags=(*LIBRARY.flags, "-O1", *target.flags)))))


def test_clang_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="the kernels need GCC 11 or newer"):
        build_library(replace(LIBRARY, flags=(*LIBRARY.flags, "-D__clang__")))


def test_a_library_compiled_once_is_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "small.c"
    source.write_text("int baton_two(void) { return 2; }")
    library = Library("small", sources=(source,), headers=(), flags=("-O1",), libraries=())
    first = build_library(library)
    changed_at = first.stat().st_mtime_ns
    assert build_library(library) == first
    assert first.stat().st_mtime_ns == changed_at
    assert [file.name for file in (tmp_path / "baton").iterdir()] == [first.name]
    assert [record.message.split(",")[0] for record in caplog.records] == [f"compiling small into {tmp_path / 'baton'}"]


def test_a_single_row_of_a_wider_tensor_is_no_wider_than_itself() -> None:
    """With AMX a product reads whole tiles of rows, for which memory is measured by the width of ``x``."""
    wide = torch.zeros(2, 4096)
    assert (Rows.of(wide[:, :64]).stride, Rows.of(wide[:1, :64]).stride) == (4096, 64)


def test_the_native_code_stays_small() -> None:
    """Lines without those that are blank or comments alone; docs/cpu-kernels.md has the limit too."""
    sources = [file.read_text() for file in (*LIBRARY.sources, *LIBRARY.headers)]
    code = re.sub(r"/\*.*?\*/", "", "\n".join(sources), flags=re.DOTALL)
    num_lines = len([line for line in code.splitlines() if line.strip()])
    assert num_lines <= MAX_NATIVE_LINES
