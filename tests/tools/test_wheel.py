"""A wheel holds the files that are no Python."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_contains_the_files_of_the_page(tmp_path):
    source = tmp_path / "source"  # a build leaves files behind
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "tests", "docs", "__pycache__", "*.egg-info")
    )
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, *build, str(source)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name.removeprefix("gateway/http/static/") for name in archive.namelist() if "/static/" in name}
    assert packed == {path.name for path in (ROOT / "gateway/http/static").iterdir()}
