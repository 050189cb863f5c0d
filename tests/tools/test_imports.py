"""Imports between modules form no cycle."""

import grimp
import networkx

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
