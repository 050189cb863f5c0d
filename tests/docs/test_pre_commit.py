"""The pre-commit hooks parse, run the checks of ./scripts/test, and use the project's own environment."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.service.processes import environment

ROOT = Path(__file__).resolve().parents[2]
UNFORMATTED = "import os\nx=  1\n"


def hooks() -> dict[str, dict[str, Any]]:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    return {hook["id"]: hook for hook in repository["hooks"]}


def run(name: str, *files: Path) -> "subprocess.CompletedProcess[str]":
    """Run a hook as pre-commit does: its entry, split into words, and the files that changed."""
    variables = {
        **environment(),
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}",
    }
    words = [*shlex.split(hooks()[name]["entry"]), *map(str, files)]
    return subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)


def test_there_is_a_hook_for_every_check_before_the_tests() -> None:
    checks = re.findall(r"^run '([^']+)'|== (import contracts)", (ROOT / "scripts" / "test").read_text(), re.M)
    assert {hook["name"] for hook in hooks().values()} == {first or second for first, second in checks}
    assert all(hook["language"] == "system" for hook in hooks().values())


def test_ruff_formats_and_checks_the_files_that_changed(tmp_path: Path) -> None:
    changed = tmp_path / "changed.py"
    changed.write_text(UNFORMATTED)
    found = run("ruff-format", changed)
    assert found.returncode == 0, found.stderr
    assert changed.read_text() == "import os\n\nx = 1\n"
    found = run("ruff-check", changed)
    assert found.returncode == 1
    assert "F401" in found.stdout


@pytest.mark.parametrize(("name", "program"), [("mypy", "mypy"), ("import-contracts", "lint-imports")])
def test_whole_project_hooks_find_their_program(name: str, program: str) -> None:
    entry = shlex.split(hooks()[name]["entry"])
    assert hooks()[name]["pass_filenames"] is False
    script = re.sub(r"exec (.*)$", r'printf "%s\\n" \1', entry[2])
    found = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env={**environment(), "VIRTUAL_ENV": sys.prefix},
        capture_output=True,
        text=True,
    )
    words = found.stdout.split("\n")
    assert found.returncode == 0, found.stderr
    assert Path(words[0]).is_file()
    assert program in found.stdout
