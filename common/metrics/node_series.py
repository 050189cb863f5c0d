"""The series ``baton_node_*`` of nodes, made from what a node says in its heartbeats.

A node shows its own, the gateway those of all nodes, under the same names and labels. The node counts, and both show:
where Prometheus scrapes both, ``max by (node)`` takes each value once.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from common.wire.messages import Heartbeat, PairState

LABELS = ("model", "node", "role")

#: Numbers of a heartbeat, which are gauges, and what each is.
LOAD = {
    "num_waiting": "Requests that wait for pages.",
    "num_running": "Requests that hold pages.",
    "num_free_pages": "Pages of the pool that are free.",
    "num_cached_pages": "Pages of the pool in the radix cache.",
    "num_quarantined_pages": "Pages that a peer may still write to.",
}
#: Totals and gauges whose names end in ``_by_VALUE``: the name of the family, its labels, and what it is.
FAMILIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "bytes": ("transfer_bytes", ("transport",), "Bytes of KV pages that this node has sent or received."),
    "transfer_seconds": ("transfer_seconds", ("transport",), "Seconds in which at least one write was under way."),
    "transfers_failed": ("transfers_failed", ("reason",), "Transfers that failed, by error code."),
    "transfers": ("open_transfers", ("stage", "transport"), "Transfers now, by what each waits for."),
    "pairs": ("pairs_attached", ("transport",), "Connections formed for KV pages."),
}


class NodeState(NamedTuple):
    """A node, as its registration and its last heartbeat describe it.

    Attributes:
        labels: model, name and role.
        heartbeat: None before the first.
    """

    labels: tuple[str, str, str]
    num_pages: int
    heartbeat: Heartbeat | None
    pairs: tuple[PairState, ...]


def node_families(nodes: Iterable[NodeState]) -> Iterator[Metric]:
    """All series of these nodes, one family after the other."""
    nodes = list(nodes)
    pages = GaugeMetricFamily("baton_node_pages", "Pages of the pool.", labels=LABELS)
    for node in nodes:
        pages.add_metric(node.labels, node.num_pages)
    yield pages
    beating = [(node.labels, node.heartbeat) for node in nodes if node.heartbeat is not None]
    for name, text in LOAD.items():
        load = GaugeMetricFamily(f"baton_node_{name[4:]}", text, labels=LABELS)
        for labels, heartbeat in beating:
            load.add_metric(labels, getattr(heartbeat, name))
        yield load
    yield from _by_name(GaugeMetricFamily, [(labels, heartbeat.gauges) for labels, heartbeat in beating])
    yield from _by_name(CounterMetricFamily, [(labels, heartbeat.counters) for labels, heartbeat in beating])
    yield _pairs(nodes)


def _pairs(nodes: Iterable[NodeState]) -> Metric:
    family = GaugeMetricFamily(
        "baton_node_pair",
        "1 for each pair in which pages can travel, 0 for each in which they should and cannot.",
        labels=[*LABELS, "peer", "transport", "why"],
    )
    for node in nodes:
        for pair in node.pairs:
            family.add_metric([*node.labels, pair.peer, pair.transport, pair.problem or pair.why], not pair.problem)
    return family


def _by_name(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    nodes: Iterable[tuple[tuple[str, str, str], Mapping[str, float]]],
) -> Iterator[Metric]:
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for labels, values in nodes:
        for name, value in sorted(values.items()):
            family, more, text, label_values = _family_of(name)
            if family not in families:
                families[family] = kind(family, text, labels=[*LABELS, *more])
            families[family].add_metric([*labels, *label_values], value)
    yield from families.values()


def _family_of(name: str) -> tuple[str, tuple[str, ...], str, list[str]]:
    """The family of a total or gauge, the family's labels beside ``LABELS``, its help, and this one's label values."""
    base, *values = name.split("_by_")
    family, labels, text = FAMILIES.get(base, ("", (), ""))
    if len(values) == len(labels) > 0:
        return f"baton_node_{family}", labels, text, values
    plain = re.sub(r"[^a-zA-Z0-9_]", "_", name.removeprefix("baton_").removesuffix("_total"))
    return f"baton_node_{plain}", (), f"{name} by node.", []
