"""What pyproject.toml asks for, listed for pip or compared with what this interpreter has.

Run by scripts/setup.sh before anything is installed, so it needs nothing but the standard library and answers in
milliseconds (a Python before 3.11 fails on its imports)::

    requirements.py [--list | --pins constraints.txt] pyproject.toml [extra ...]

Without ``--list`` the exit status says whether everything is there in a version that will do, with ``--pins`` also
whether nothing differs from its pin; standard error names what is missing.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """The requirement strings of the project and of some of its extras."""
    with open(pyproject, "rb") as file:
        project = tomllib.load(file)["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


def missing(lines: list[str]) -> Iterator[str]:
    """Those requirements, all of the form ``name>=version``, that this interpreter does not meet."""
    for line in lines:
        name, _, least = line.partition(">=")
        try:
            if release(metadata.version(name)) < release(least):
                yield line
        except metadata.PackageNotFoundError:
            yield line


def strays(pins: str) -> Iterator[str]:
    """Lines ``name==version`` of a file whose package is here in another version; +cpu and the like do not count."""
    for line in Path(pins).read_text().split("\n"):
        name, _, version = line.partition("==")
        try:
            if version and metadata.version(name).split("+")[0] != version:
                yield line
        except metadata.PackageNotFoundError:
            continue


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


def main() -> int:
    """Exit status: 0 if everything is there (or was listed), 1 if not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--pins")
    parser.add_argument("pyproject")
    parser.add_argument("extras", nargs="*")
    asked = parser.parse_args()
    lines = requirements(asked.pyproject, asked.extras)
    if asked.list:
        print("\n".join(lines))
        return 0
    absent = [*missing(lines), *(strays(asked.pins) if asked.pins else ())]
    print("missing: " + ", ".join(absent) if absent else "complete", file=sys.stderr)
    return int(bool(absent))


if __name__ == "__main__":
    sys.exit(main())
