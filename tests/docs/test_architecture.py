"""Every path and every dotted name that the pages mention in backticks exists in the checkout.

The code is parsed, not imported, so that a page may name modules that need torch or a GPU.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "gateway", "prefill_node", "decode_node", "kv_transfer", "scripts", "tests", "docs", "deploy")
#: The changelog also names what is gone.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "CHANGELOG.md"),
]
#: ``NAME`` and the like stand for the reader's own choice.
PLACEHOLDER = re.compile(r"NAME|YOURS|\*|my_")


def code_spans(page: Path) -> list[str]:
    """Texts in single backticks, outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return re.findall(r"`([^`\n]+)`", text)


@cache
def names_in(module: Path) -> dict[str, ast.stmt]:
    """What a module defines or imports at its top level."""
    return _names(ast.parse(module.read_text()).body)


def _names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found.update({name.id: node for name in ast.walk(target) if isinstance(name, ast.Name)})
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found.update({alias.asname or alias.name: node for alias in node.names})
    return found


def exists(dotted: str) -> bool:
    """Whether ``package.module.Class.member`` (or a part of it) is there."""
    words = dotted.split(".")
    for length in range(len(words), 0, -1):
        place = ROOT.joinpath(*words[:length])
        module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        if not module.is_file():
            continue
        scope = names_in(module)
        for position, name in enumerate(words[length:], start=length + 1):
            node = scope.get(name)
            if node is None:
                return False
            if position < len(words):
                if not isinstance(node, ast.ClassDef):
                    return False
                scope = _names(node.body)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for span in code_spans(page):
        match = re.fullmatch(r"(?:\./)?([\w.-]+/[\w./@-]*)(?:::\w+)?", span)
        if match is None or PLACEHOLDER.search(span):
            continue
        path = match.group(1)
        is_ours = path.split("/")[0] in PACKAGES
        if is_ours and not (ROOT / path).exists():
            missing.append(span)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_dotted_name_that_a_page_mentions_exists(page: Path) -> None:
    missing = []
    for span in code_spans(page):
        match = re.fullmatch(rf"((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?:\(.*\))?", span)
        if match is None or PLACEHOLDER.search(span):
            continue
        if not span.endswith((".md", ".sh")) and not exists(match.group(1)):
            missing.append(span)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_that_links_to_a_module_is_defined_there(page: Path) -> None:
    links = re.findall(r"\[`([\w.]+)`\]\(([\w./]+)\.py\)", page.read_text())
    modules = {target: (page.parent / target).resolve().relative_to(ROOT) for _, target in links}
    missing = [name for name, target in links if not exists(".".join([*modules[target].parts, name]))]
    assert not missing


def test_every_class_that_the_architecture_page_names_is_defined() -> None:
    modules = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    defined = {name for path in modules for name in re.findall(r"^(?:class )?([A-Z]\w+)", path.read_text(), re.M)}
    part, _, rest = (ROOT / "docs" / "architecture.md").read_text().partition("| here | in SGLang | in vLLM |")
    table, _, end = rest.partition("\n\n")
    here = [row.split(" | ")[0] for row in table.splitlines()]  # the other columns have names of other projects
    named = set(re.findall(r"`([A-Z][a-z]\w+)(?:\.\w+)?`", "\n".join([part, *here, end])))
    assert len(named) >= 60  # the page would be of little use without them
    assert named - defined == set()


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert exists("common.wire.messages.Generate")
    assert exists("common.wire.messages.Generate.prompt")
    assert not exists("common.wire.messages.Regenerate")
    assert not exists("common.wire.messages.Generate.promptly")
    assert not exists("common.wires")
