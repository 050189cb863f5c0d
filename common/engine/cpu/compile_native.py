"""Compiles C files into a shared library, once per machine.

The system's C compiler builds the library. Its file is in ``~/.cache/baton`` (or ``$XDG_CACHE_HOME/baton``) and its
name holds a hash of sources, flags and processor, so that a changed file or another machine gets a new library.
"""

import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.system.cache_folder import cache_folder

log = logging.getLogger(__name__)

MAX_COMPILE_S = 120.0  # for one file
_FLAGS = ("-fPIC", "-fvisibility=hidden")


class BuildError(Exception):
    """A library cannot be built; the message is the compiler's output or the reason."""


@dataclass(frozen=True)
class Library:
    """Sources and flags of a shared library.

    Attributes:
        sources: C files, each compiled separately.
        headers: included files, which count in the hash.
        flags: compiler flags beside those that a shared library needs.
    """

    name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    flags: tuple[str, ...]
    libraries: tuple[str, ...]


def build_library(library: Library) -> Path:
    """Return the library's file; compile it if it does not exist yet.

    Raises:
        BuildError: there is no compiler, it fails or takes too long, or the library cannot be stored.
    """
    try:
        folder = cache_folder()
        file = folder / f"{library.name}-{_fingerprint(library)}.so"
        if not file.exists():
            log.info("compiling %s into %s, once; this may take a minute", library.name, folder)
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as place:
                _compile(library, Path(place)).replace(file)  # atomic: other processes may compile at the same time
        return file
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        raise BuildError(str(getattr(error, "stderr", None) or error).strip()[:500]) from error


def _compile(library: Library, place: Path) -> Path:
    compiler = os.environ.get("CC", "cc")
    objects = [place / f"{source.stem}.o" for source in library.sources]
    for source, target in zip(library.sources, objects, strict=True):
        _run(compiler, *_FLAGS, *library.flags, "-c", str(source), "-o", str(target))
    made = place / "library.so"
    # Without the flags, since -fopenmp would link an OpenMP runtime.
    _run(compiler, "-shared", *map(str, objects), *library.libraries, "-o", str(made))
    return made


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=MAX_COMPILE_S)


def _fingerprint(library: Library) -> str:
    words = (*_FLAGS, *library.flags, *library.libraries, os.environ.get("CC", "cc"), platform.machine(), _processor())
    files = [file.read_bytes() for file in (*library.sources, *library.headers)]
    return hashlib.sha256(b"".join(files) + " ".join(words).encode()).hexdigest()[:32]


def _processor() -> str:
    """Return model and features of the first processor, on which ``-march=native`` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("vendor_id", "model", "flags", "Features", "CPU")))
