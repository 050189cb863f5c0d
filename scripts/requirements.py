"""Lists the requirements in pyproject.toml for pip, or compares them with the installed packages.

scripts/setup.sh runs it before anything is installed, so it uses only the standard library (and fails on its imports
before Python 3.11)::

    requirements.py [--list | --pins constraints.txt] pyproject.toml [extra ...]

Without ``--list`` the exit status is 0 if every requirement is met and, with ``--pins``, no installed version differs
from its pin. Standard error names what is missing.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """The requirements of the project and of the given extras."""
    with open(pyproject, "rb") as file:
        project = tomllib.load(file)["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


def missing(lines: list[str]) -> Iterator[str]:
    """The requirements, of the form ``name>=version``, that this interpreter does not meet."""
    for line in lines:
        name, _, least = line.partition(">=")
        try:
            if release(metadata.version(name)) < release(least):
                yield line
        except metadata.PackageNotFoundError:
            yield line


def strays(pins: str) -> Iterator[str]:
    """Lines ``name==version`` of a file whose package has another version here, ignoring suffixes such as +cpu."""
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
    """Return the exit status: 0 if all requirements are met or listed, else 1."""
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
