"""``bench NAME``: one benchmark by name. Each is a file ``scripts/benchmarks/NAME.py`` with its own options."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def names() -> dict[str, str]:
    """What each benchmark measures, by name: the first line of its file."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_text()
        if "__main__" in text and path != Path(__file__):  # others are what several share
            found[path.stem] = text.split("\n", 1)[0].strip('"')
    return found


def main(argv: Sequence[str]) -> int:
    known = names()
    if not argv or argv[0] not in known:
        is_question = bool(argv) and argv[0] in ("-h", "--help")
        lines = ["Usage: bench NAME [OPTIONS], where NAME is one of", *(f"  {name:12} {known[name]}" for name in known)]
        print("\n".join(lines), file=sys.stdout if is_question else sys.stderr)
        return 0 if is_question else 2
    return os.execv(sys.executable, [sys.executable, "-m", f"scripts.benchmarks.{argv[0]}", *argv[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
