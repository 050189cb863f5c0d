"""Compiles C files into a shared library, once per machine.

The system's C compiler builds the library. Its file is in ``~/.cache/baton`` (or ``$XDG_CACHE_HOME/baton``) and its
name holds a hash of sources, flags and processor, so that a changed file or another machine gets a new library.
"""

import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Library:
    """Sources and flags of a shared library.

    Attributes:
        name: start of the file's name.
        sources: C files, each compiled separately.
        headers: included files, which count in the hash.
        flags: compiler flags beside those that a shared library needs.
        libraries: linker flags, such as ``-lm``.
    """

    name: str
    sources: Sequence[Path]
    headers: Sequence[Path] = ()
    flags: Sequence[str] = ()
    libraries: Sequence[str] = ()


#: Errors of ``build_library``; RuntimeError means that the user has no home folder.
BUILD_ERRORS = (OSError, subprocess.SubprocessError, RuntimeError)
_FLAGS = ("-fPIC", "-fvisibility=hidden")


def build_library(library: Library, timeout_s: float = 120.0) -> Path:
    """Return the library's file; compile it if it does not exist yet.

    Raises:
        OSError, subprocess.SubprocessError, RuntimeError: there is no compiler, it fails, it takes longer than
            ``timeout_s`` seconds for a file, or the library cannot be stored.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    file = folder / f"{library.name}-{_fingerprint(library)}.so"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = _compile(library, Path(place), timeout_s)
            made.replace(file)  # atomic, as other processes may compile at the same time
    return file


def build_failure(error: BaseException) -> str:
    """Return the compiler's output, or else the message of the error."""
    return str(getattr(error, "stderr", None) or error).strip()[:500]


def _compile(library: Library, place: Path, timeout_s: float) -> Path:
    compiler = os.environ.get("CC", "cc")
    objects = [place / f"{source.stem}.o" for source in library.sources]
    for source, target in zip(library.sources, objects, strict=True):
        _run(timeout_s, compiler, *_FLAGS, *library.flags, "-c", str(source), "-o", str(target))
    made = place / "library.so"
    # Without the flags, since -fopenmp would link an OpenMP runtime.
    _run(timeout_s, compiler, "-shared", *map(str, objects), *library.libraries, "-o", str(made))
    return made


def _run(timeout_s: float, *command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)


def _fingerprint(library: Library) -> str:
    digest = hashlib.sha256()
    for file in (*library.sources, *library.headers):
        digest.update(file.read_bytes())
    words = (*_FLAGS, *library.flags, *library.libraries, os.environ.get("CC", "cc"), platform.machine())
    digest.update(" ".join(words).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """Return model and features of the first processor, on which ``-march=native`` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("vendor_id", "model", "flags", "Features", "CPU")))
