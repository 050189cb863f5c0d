"""Downloads the packages that ``gpu_check`` needs beside torch, for a machine that reaches no package index.

Usage: ``gpu_check wheels FOLDER [--nixl] [--python-version 3.12]``, in an environment with Baton's extra ``dev``, whose
versions are taken. What comes with torch and transformers is left to the other machine. Without NIXL the wheels have 20
MB; NIXL adds 60.
"""

import argparse
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What the tests and benchmarks on a GPU import, beside Baton's own requirements.
TESTS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "aiohttp", "psutil", "rich")
NIXL = ("nixl", "nixl-cu13")
#: These, and what only they need, are the other machine's.
THEIRS = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "safetensors",
    "tokenizers",
    "huggingface-hub",
    "filelock",
    "nixl-cu12",
)
#: Wheels for versions of glibc up to 2.35, that of Ubuntu 22.04.
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 36)))


def needed(roots: list[str]) -> list[str]:
    """The roots and everything that they need, as ``name==version`` of this environment, sorted by name.

    Requirements that do not apply here, such as extras, are not installed and left out.
    """
    found: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        name = re.split(r"[^A-Za-z0-9._-]", waiting.pop(), maxsplit=1)[0].replace("_", "-").lower()
        if name in found or name in THEIRS or name.startswith(("nvidia", "cuda-")):
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = distribution.version
        waiting += [line for line in distribution.requires or [] if "extra ==" not in line]
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def command(folder: str, python_version: str, *, has_nixl: bool) -> list[str]:
    """The call of pip that downloads them."""
    from scripts.requirements import requirements

    roots = [*requirements(str(ROOT / "pyproject.toml"), []), *TESTS, *(NIXL if has_nixl else ())]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    return [*pip, f"--python-version={python_version}", *platforms, *needed(roots)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check wheels", description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="where to put the wheels")
    parser.add_argument("--nixl", action="store_true", help="also those of NIXL, for transfers from GPU memory")
    parser.add_argument("--python-version", default="3.12", help="of the other machine (%(default)s)")
    options = parser.parse_args(arguments)
    return subprocess.run(
        command(options.folder, options.python_version, has_nixl=options.nixl), check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
