"""The pages are true to the commands: flags, variables, metrics, links, lengths; and what they show is run."""

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from common.config.cli import CLASSES
from common.config.foreign_flags import ALWAYS_ON, NO_EQUAL, aliases_of
from common.config.options import options_of
from common.config.scheduling import POLICIES
from common.config.shared import OTHER_VARIABLES
from common.metrics.node_series import FAMILIES, GAUGES, LOAD, TOTALS
from scripts.chaos_harness.config import ChaosConfig
from scripts.load_tester.config import LoadtestConfig
from scripts.simulator.config import SimulateConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
#: The changelog also names what is gone.
PRESENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
MOST_LINES = {
    "README.md": 150,
    "architecture.md": 250,
    "operations.md": 250,
    "benchmarks.md": 250,
    "CONTRIBUTING.md": 200,
}
CONFIGURATIONS = {**CLASSES, "loadtest": LoadtestConfig, "simulate": SimulateConfig, "chaos": ChaosConfig}
#: Flags of other programs, and of ./scripts/test.
OTHER_FLAGS = {
    "--all", "--help", "--config", "--timeout", "--enable-metrics", "--enable-cache-report", "--network", "--pid",
    "--schedule-policy", "--sample-seed", "--compare",
}  # fmt: skip


def text_of(page: Path) -> str:
    return page.read_text()


def flags_of(command: str) -> set[str]:
    """Every flag that a command takes."""
    options = options_of(CONFIGURATIONS[command])
    found = {option.flag for option in options.values()} | {"--config", "--version", "--help"}
    foreign = {*ALWAYS_ON, *(flag for name in options for flag in aliases_of(name))} if command in CLASSES else set()
    return found | {"--no-" + flag[2:] for flag in found} | foreign


@cache
def benchmark_names() -> set[str]:
    """Names that ``bench --help`` lists."""
    words = [sys.executable, "-m", "scripts.cli", "bench", "--help"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return set(re.findall(r"^  (\w+) ", found.stdout, re.M))


@cache
def benchmark_flags() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "scripts").rglob("*.py"))


def is_benchmark_flag(flag: str) -> bool:
    """Whether a benchmark, the load tester or the simulator spells this flag in its source, as flag or as a field."""
    return f'"{flag}' in benchmark_flags() or flag[2:].replace("-", "_") in benchmark_flags()


def command_lines(page: Path) -> list[str]:
    """Commands after ``$`` in console blocks, continued lines joined, and ``./scripts/...`` in backticks."""
    text = text_of(page)
    blocks = re.findall(r"^```console\n(.*?)^```", text, flags=re.S | re.M)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return [line[2:] for line in lines if line.startswith("$ ")] + re.findall(r"`(\./scripts/[^`\n]+)`", prose)


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_every_command_line_names_a_command_and_flags_that_exist(page: Path) -> None:
    wrong = []
    for line in command_lines(page):
        if "./scripts/" not in line:
            continue
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if not words or not words[0].startswith("./scripts/"):
            continue
        name, rest = words[0].removeprefix("./scripts/"), words[1:]
        if not (ROOT / "scripts" / name).is_file():
            wrong.append(f"{line}: there is no such command")
        flags = [word.split("=")[0] for word in rest if word.startswith("--")]
        if name in CONFIGURATIONS:
            known = flags_of(name) | ({"--demo", "--compare"} if name == "loadtest" else set())
            wrong += [f"{line}: {flag}" for flag in flags if flag not in known]
        elif name == "bench":
            if rest and not rest[0].isupper() and rest[0] not in benchmark_names():
                wrong.append(f"{line}: there is no benchmark {rest[0]}")
            wrong += [f"{line}: {flag}" for flag in flags if not is_benchmark_flag(flag)]
    assert not wrong


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_every_flag_and_variable_is_one_that_a_command_takes(page: Path) -> None:
    flags = {flag for command in CONFIGURATIONS for flag in flags_of(command)} | OTHER_FLAGS
    variables = {option.env for cls in CONFIGURATIONS.values() for option in options_of(cls).values()}
    variables |= {*OTHER_VARIABLES, "BATON_"}
    if page.name == "flags.md":
        flags |= NO_EQUAL.keys()
    spans = " ".join(re.findall(r"`([^`\n]+)`", text_of(page)))
    unknown = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", spans) if flag not in flags}
    assert not {flag for flag in unknown if not is_benchmark_flag(flag)}
    assert not set(re.findall(r"\bBATON_[A-Z_]+", spans)) - variables


@cache
def source_words() -> set[str]:
    """Every word in the code of gateway and nodes."""
    packages = ("gateway", "common", "prefill_node", "decode_node", "kv_transfer")
    source = "\n".join(path.read_text() for package in packages for path in (ROOT / package).rglob("*.py"))
    return set(re.findall(r"\w+", source))


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_every_metric_is_made_somewhere(page: Path) -> None:
    words = source_words()
    unknown = []
    for name in set(re.findall(r"\bbaton_[a-z_]+", " ".join(re.findall(r"`([^`\n]+)`", text_of(page))))):
        short = name.removesuffix("_total").removesuffix("_")
        bare = short.removeprefix("baton_").removeprefix("node_")
        gauge = f"num_{bare}"
        if not words & {name, short, bare, gauge} and name != "baton_":
            unknown.append(name)
    assert not unknown


def documented_series() -> set[str]:
    """Names of the series in metrics.md, where `..._free_pages` stands for `baton_node_free_pages`."""
    spans = " ".join(re.findall(r"`([^`\n]+)`", text_of(DOCS / "metrics.md")))
    return set(re.findall(r"\bbaton_\w+", re.sub(r"(?<!\w)\.\.\._", "baton_node_", spans)))


def test_metrics_lists_every_series_of_nodes() -> None:
    families = {f"{family}{'' if name == 'transfers' else '_total'}" for name, (family, _, _) in FAMILIES.items()}
    plain = {*(name.removeprefix("num_") for name in LOAD), *GAUGES, *(f"{name}_total" for name in TOTALS)}
    assert {f"baton_node_{name}" for name in families | plain} - documented_series() == set()


def test_metrics_lists_every_series_of_the_dashboard() -> None:
    board = (ROOT / "deploy" / "grafana" / "baton.json").read_text()
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bbaton_\w+", board)}
    assert names - documented_series() == set()


# ---- links and lengths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "deploy" / "README.md"], ids=lambda page: f"{page.parent.name}-{page.name}"
)
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", text_of(page))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_anchor_of_a_link_is_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text_of(page))
    missing = [
        f"{name}#{anchor}" for name, anchor in links if anchor not in anchors(page.parent / name if name else page)
    ]
    assert not missing


@pytest.mark.parametrize("name", sorted(MOST_LINES))
def test_pages_keep_their_length(name: str) -> None:
    page = ROOT / name if name == "README.md" else DOCS / name
    assert len(text_of(page).splitlines()) <= MOST_LINES[name]


def test_the_readme_counts_the_policies() -> None:
    words = ["seven", "eight", "nine", "ten", "eleven", "twelve"]
    (word,) = re.findall(r"(\w+) policies and your own", text_of(ROOT / "README.md"))
    assert words.index(word) + 7 == len(POLICIES)


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#\s]+)", text_of(ROOT / "README.md")))
    assert {page.name for page in DOCS.glob("*.md")} <= linked


def test_every_picture_is_shown_somewhere() -> None:
    shown = {Path(target).name for page in PAGES for target in re.findall(r"\]\(([^)#\s]+\.svg)\)", text_of(page))}
    assert {picture.name for picture in DOCS.rglob("*.svg")} <= shown


# ---- short commands are run -----------------------------------------------------------------------------------------


@pytest.mark.slow(sample=0.3)
@pytest.mark.parametrize("command", [*sorted(CLASSES), "loadtest", "simulate", "bench"])
def test_help_of_every_command_is_shown(command: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "scripts.cli", command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert "Usage:" in found.stdout


def test_the_readmes_simulation_runs() -> None:
    (line,) = [line for line in command_lines(ROOT / "README.md") if line.startswith("./scripts/simulate")]
    words = shlex.split(line)[1:]
    words[words.index("--duration") + 1] = "2"
    found = subprocess.run(
        [sys.executable, "-m", "scripts.cli", "simulate", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert "time to first token" in found.stdout
