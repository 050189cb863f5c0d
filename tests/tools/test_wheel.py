"""A release wheel holds the files that are no Python, and the CPU kernels compiled for every target."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from common.engine.cpu.kernels import library_for
from common.engine.cpu.targets import TARGETS, processor_features
from scripts.build_wheel import build_wheel, main, platform_tag

ROOT = Path(__file__).parents[2]

#: Multiplies and attends with the kernels of every target that this processor has, in the installed package.
PROGRAM = """
import torch

from common.engine.attention import make_attention
from common.engine.attention.cpu import CpuAttention
from common.engine.cpu.kernels import CARRIED, open_kernels
from common.engine.cpu.targets import TARGETS, processor_features
from common.engine.kv_pool import KVPool
from common.cache.page_layout import PageLayout

x = torch.randn(3, 64)
for target in TARGETS:
    if target.features <= processor_features():
        kernels = open_kernels(target)
        normed = kernels.add_rms_norm(x, None, torch.ones(64), 1e-6)
        torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x, (64,), eps=1e-6))
        print(target.name)
assert isinstance(make_attention("auto", KVPool(PageLayout(1, 1, 16, 16, "float32"), 2), 1), CpuAttention)
print(CARRIED)
"""


@pytest.mark.slow
@pytest.mark.skipif(not processor_features() or shutil.which("cc") is None, reason="wheels are built on x86-64 Linux")
def test_a_wheel_runs_its_kernels_where_there_is_no_compiler(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packed = {name.removeprefix("gateway/http/static/") for name in names if "/static/" in name}
    assert packed == {path.name for path in (ROOT / "gateway/http/static").iterdir()}
    libraries = {Path(name).stem for name in names if name.endswith(".so")}
    assert libraries == {library_for(target).name for target in TARGETS}

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    install = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel))
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True, cwd=tmp_path)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))  # torch and others, as installed here

    cache = tmp_path / "cache"
    environment = {"PATH": str(tmp_path / "venv/bin"), "XDG_CACHE_HOME": str(cache), "HOME": str(tmp_path)}
    ended = subprocess.run(
        [python, "-c", PROGRAM], capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    usable = [target.name for target in TARGETS if target.features <= processor_features()]
    assert ended.stdout.split() == [*usable, str(packages / "common/engine/cpu/libraries")]
    assert not cache.exists(), "something was compiled"

    help_text = subprocess.run(
        [tmp_path / "venv/bin/baton", "decode", "--help"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert help_text.returncode == 0, help_text.stderr
    assert "--weight-dtype" in help_text.stdout


def test_the_platform_of_a_wheel_follows_from_the_newest_glibc_that_a_library_needs(tmp_path: Path) -> None:
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    old.write_bytes(b"\0GLIBC_2.14\0GLIBC_2.2.5\0")
    new.write_bytes(b"\0GLIBC_2.14\0GLIBC_2.34\0")
    assert platform_tag([old]) == "manylinux_2_28_x86_64"
    assert platform_tag([old, new]) == "manylinux_2_34_x86_64"


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["build_wheel", str(tmp_path / "file")])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("scripts.build_wheel.build_library", lambda library: pytest.fail("it was compiled"))
    assert main() == 1
    assert capsys.readouterr().err == f"build_wheel: {tmp_path}/file: File exists\n"
