"""C files of the package, compiled once for this machine into a shared library that is kept.

The system's C compiler makes it; it lies in ``~/.cache/baton`` (or ``XDG_CACHE_HOME``) under a hash of sources, flags
and processor, so that a changed file or another machine gets a library of its own.
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
    """What a shared library is made of.

    Attributes:
        name: of the file, in front of the hash.
        sources, headers: C files; each source is compiled by itself.
        flags: of the compiler, beside those that a shared library needs.
        libraries: to link with, as ``-lm``.
    """

    name: str
    sources: Sequence[Path]
    headers: Sequence[Path] = ()
    flags: Sequence[str] = ()
    libraries: Sequence[str] = ()


#: What ``built`` may raise; the last of them if there is no home.
NOT_BUILT = (OSError, subprocess.SubprocessError, RuntimeError)
_FLAGS = ("-fPIC", "-fvisibility=hidden")


def built(library: Library, timeout_s: float = 120.0) -> Path:
    """The library's file, compiled now if it never was.

    Raises:
        OSError, subprocess.SubprocessError, RuntimeError: there is no compiler, or it fails or takes longer than
            ``timeout_s`` for a file; there is nowhere to keep the library.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    file = folder / f"{library.name}-{_fingerprint(library)}.so"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = _compile(library, Path(place), timeout_s)
            made.replace(file)  # whole or not at all, whoever else compiles at the same time
    return file


def reason_of(error: BaseException) -> str:
    """Why ``built`` failed, in the compiler's own words if it has said any."""
    return str(getattr(error, "stderr", None) or error).strip()[:500]


def _compile(library: Library, place: Path, timeout_s: float) -> Path:
    compiler = os.environ.get("CC", "cc")
    objects = [place / f"{source.stem}.o" for source in library.sources]
    for source, target in zip(library.sources, objects, strict=True):
        _run(timeout_s, compiler, *_FLAGS, *library.flags, "-c", str(source), "-o", str(target))
    made = place / "library.so"
    # Without the flags: a runtime that one of them brings along (-fopenmp) must not be linked in.
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
    """What ``-march=native`` depends on: model and features of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("vendor_id", "model", "flags", "Features", "CPU")))
