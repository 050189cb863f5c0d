"""What pyproject.toml asks for, listed for pip or compared with what this interpreter has.

Run by scripts/setup.sh before anything is installed, so it needs nothing but the standard library and answers in
milliseconds (a Python before 3.11 fails on its imports): ``requirements.py [--list] pyproject.toml [extra ...]``.
Without ``--list`` the exit status says whether everything is there in a version that will do, and standard error names
what is not.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata


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


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


def main(words: list[str]) -> int:
    """Exit status: 0 if everything is there (or was listed), 1 if not."""
    is_list = words[0] == "--list"
    lines = requirements(words[int(is_list)], words[int(is_list) + 1 :])
    if is_list:
        print("\n".join(lines))
        return 0
    absent = list(missing(lines))
    print("missing: " + ", ".join(absent) if absent else "complete", file=sys.stderr)
    return int(bool(absent))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
