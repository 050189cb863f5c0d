"""``./scripts/build_wheel [FOLDER]``: makes a release wheel in a folder, by default ``dist``.

The wheel carries the CPU kernels compiled for every target of ``common.engine.cpu.targets``, so that no compiler is
needed where it is installed. It must be built on x86-64 Linux, with a compiler.
"""

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.engine.cpu.compile_native import BuildError, build_library
from common.engine.cpu.kernels import CARRIED, library_for
from common.engine.cpu.targets import TARGETS

ROOT = Path(__file__).parents[1]
#: What the wheel is built from, in a copy: setuptools would take files of an earlier build for files of this one.
SOURCES = (
    "common",
    "decode_node",
    "gateway",
    "kv_transfer",
    "prefill_node",
    "scripts",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
#: The oldest glibc that torch's wheels run on.
MIN_GLIBC = 28


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="build_wheel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist", help="where to put the wheel (dist)")
    folder = parser.parse_args().folder
    if platform.machine() != "x86_64":
        print(f"build_wheel: this machine is {platform.machine()}; build the wheel on x86-64", file=sys.stderr)
        return 2
    try:
        print(build_wheel(folder))
    except BuildError as error:
        print(f"build_wheel: cannot compile the kernels: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"build_wheel: pip failed: {error.stderr}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"build_wheel: {error.filename or folder}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def build_wheel(folder: Path) -> Path:
    """Build the wheel into ``folder`` and return its path.

    Raises:
        BuildError: the kernels cannot be compiled.
        CalledProcessError: pip cannot build the wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as threads:
        libraries = list(threads.map(build_library, map(library_for, TARGETS)))
    with tempfile.TemporaryDirectory() as place:
        source, made = Path(place) / "source", Path(place) / "made"
        _copy_sources(source)
        carried = source / CARRIED.relative_to(ROOT)
        carried.mkdir()
        for target, library in zip(TARGETS, libraries, strict=True):
            shutil.copyfile(library, carried / f"{library_for(target).name}.so")
        build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(made))
        tag = f"--config-settings=--build-option=--plat-name={platform_tag(libraries)}"
        command = (sys.executable, "-m", "pip", *build, tag, str(source))
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=place)
        (wheel,) = made.glob("*.whl")
        return Path(shutil.copyfile(wheel, folder / wheel.name))


def _copy_sources(to: Path) -> None:
    to.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.so"))
        else:
            shutil.copyfile(ROOT / name, to / name)


def platform_tag(libraries: Iterable[Path]) -> str:
    """Return the platform in the wheel's name, by the newest version of glibc that a library asks for."""
    found = re.findall(rb"\0GLIBC_2\.(\d+)", b"".join(file.read_bytes() for file in libraries))
    return f"manylinux_2_{max(MIN_GLIBC, *map(int, found))}_x86_64"


if __name__ == "__main__":
    sys.exit(main())
