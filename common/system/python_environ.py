"""The environment of other Python processes of Baton."""

import os
from collections.abc import Mapping
from pathlib import Path

#: The checkout, or the folder of the installed packages.
ROOT = Path(__file__).resolve().parents[2]


def python_environ(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return an environment where Python finds the same Baton as here, and nothing in its working directory."""
    environ = {**inherited, "PYTHONSAFEPATH": "1"}
    if (ROOT / "pyproject.toml").exists():  # a checkout rather than an installed package
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH", "")]))
    return environ
