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
#: The other gauges of heartbeats, and what each is, its unit first.
GAUGES = {
    "evictable_pages": "Pages in the radix cache that no request uses.",
    "granted_pages": "Pages that transfers write to.",
    "window_pages": "Pages of the pool of window layers.",
    "held_window_pages": "Window pages that requests hold.",
    "unreserved_window_pages": "Window pages that further requests can reserve.",
    "orphans": "Requests with a key whose gateway is lost.",
}
#: The totals of heartbeats, and what each is, its unit first.
TOTALS = {
    "busy_seconds": "Seconds in steps of the engine.",
    "steps": "Steps of the engine.",
    "requests": "Requests sent here.",
    "continued_requests": "Requests sent here that continue an earlier output.",
    "interrupted_requests": "Requests whose attempt ended here and that go on elsewhere.",
    "failed_requests": "Requests that ended here with an error.",
    "requests_moved": "Requests that another decode node has taken over with their pages.",
    "failed_moves": "Requests that another decode node could not take over.",
    "prompt_tokens": "Tokens of prompts whose first token was sampled here.",
    "prompt_tokens_cached": "Tokens of these prompts that the cache held.",
    "prompt_tokens_computed": "Tokens of prompts that were computed here.",
    "output_tokens": "Tokens sampled here.",
    "local_prefills": "Prompts that a decode node has computed.",
    "chunked_requests": "Prompts computed in several chunks.",
    "retractions": "Requests that lost their pages.",
    "preemptions": "Requests that gave way to a more urgent one.",
    "pauses": "Requests that lost their row and kept their pages.",
    "resumes": "Requests with output whose tokens a prefill node computes again.",
    "resumed_remotely": "Retracted requests whose tokens a prefill node computes again.",
    "resumed_tokens_computed": "Tokens that a decode node has computed again.",
    "skipped_ahead": "Requests that overtook one for which memory was short.",
    "budget_tokens": "Tokens that the steps of a prefill node could have computed.",
    "budget_tokens_used": "Tokens that these steps computed.",
    "budget_rows": "Rows that the steps of a decode node could have had.",
    "budget_rows_used": "Rows that these steps had.",
    "transfers": "Prompts of which all pages have arrived.",
    "granted_tokens": "Tokens of prompts for which a decode node has granted pages.",
    "pages_cached": "Pages of these prompts that its cache held.",
    "pages_sent": "Pages sent, or slabs where window layers have a pool of their own.",
    "pages_overlapped": "Pages sent while their prompt was computed.",
    "overlapped_transfers": "Chunked prompts of which pages were sent before the last chunk.",
    "pages_received": "Pages received.",
    "pages_verified": "Pages compared with their checksum.",
    "checksum_mismatches": "Pages that arrived damaged.",
    "pages_resent": "Pages sent again.",
    "pages_kept": "Pages that arrived before their transfer failed, and are kept.",
    "pages_quarantined": "Pages put into quarantine.",
    "refused_pages": "Pages, or parts of some, that arrived without permission.",
    "bytes_sent": "Bytes of KV pages sent.",
    "bytes_saved_by_cache": "Bytes of KV pages that were not sent, since the decode node had them cached.",
    "write_seconds": "Seconds in which the event loop handed pages to transports.",
    "transfers_received": "Transfers that are complete.",
    "broken_pairs": "Data connections that broke.",
    "reconnects": "Attempts to form a data connection again.",
    "refused_grants": "Grants of pages that a prefill node refused.",
    "stale_messages": "Messages about transfers and connections that were over.",
    "stuck_writes": "Writes of NIXL that ended in an error.",
    "nixl_invalidations": "Times that NIXL was closed and opened again, which ends the writes of lost peers.",
    "refused_connections": "Control connections refused.",
    "dropped_messages": "Control messages dropped.",
    "control_bytes_sent": "Bytes of control messages sent.",
    "failed_checks": "Checks of the owners of pages that failed.",
    "own_policy_failures": "Errors of a policy of the user's own.",
}
#: The prefix of totals whose names end with a reason, and what they are.
REJECTED, REJECTED_TEXT = "rejected_", "Data connections rejected for the reason in the name."
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
    text = REJECTED_TEXT if name.startswith(REJECTED) else f"{name}, which this version does not know."
    return f"baton_node_{plain}", (), GAUGES.get(name) or TOTALS.get(name) or text, []
