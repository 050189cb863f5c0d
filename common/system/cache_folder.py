"""Where files are that a machine computes once."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/baton``, or ``~/.cache/baton``. Raises RuntimeError: the user has no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
