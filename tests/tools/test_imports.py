"""Imports between modules form no cycle, and an installation has all that modules need."""

from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "decode_node", "gateway", "kv_transfer", "prefill_node", "scripts")


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for type checking count, too."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = networkx.DiGraph(
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    assert imports.number_of_edges() > 1_000
    assert [sorted(circle) for circle in networkx.strongly_connected_components(imports) if len(circle) > 1] == []


def test_no_module_needs_the_folder_of_tests_which_a_wheel_lacks() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert [path.name for path in modules if '"tests"' in path.read_text()] == []
