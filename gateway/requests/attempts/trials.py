"""Attempts that show whether nodes can be trusted again.

A request may *probe* a pair of nodes whose transfers have failed lately, or reserve its nodes, since it may have
killed those before. Meanwhile the pair, or the nodes, get no new requests.
"""

from gateway.requests.in_flight import InFlightRequest
from gateway.workers.routing.pair_health import PairKey
from gateway.workers.routing.router import WorkerPair


def begin_trial(flight: InFlightRequest, pair: WorkerPair) -> None:
    """Make an attempt a trial if its request is suspect, or if its pair is to be probed."""
    registry = flight.pool.registry
    if flight.recovery is not None and flight.recovery.is_suspect:
        flight.has_reserved_nodes = True
        registry.set_reserved(pair.nodes, True)
    flight.is_probe = False
    if pair.prefill and pair.decode and registry.health.breakers:
        flight.is_probe = registry.begins_probe(PairKey(pair.prefill, pair.decode))


def end_passed_trial(flight: InFlightRequest) -> bool:
    """End a trial as soon as its output shows enough. Return whether nodes get other requests again."""
    assert flight.pair is not None
    is_passed = False
    if flight.is_probe and flight.is_prefilled:
        is_passed = _end_probe(flight, flight.pair)
    if (
        flight.has_reserved_nodes
        and flight.recovery is not None
        and flight.recovery.has_progressed(len(flight.stream.ids))
    ):
        is_passed = _release(flight, flight.pair)
    return is_passed


def end_trial(flight: InFlightRequest, pair: WorkerPair) -> bool:
    """Note what the end of an attempt says about its nodes. Return whether these get other requests again."""
    is_probe = bool(flight.pool.registry.health.breakers) and _end_probe(flight, pair)
    return (flight.has_reserved_nodes and _release(flight, pair)) or is_probe


def _end_probe(flight: InFlightRequest, pair: WorkerPair) -> bool:
    """Tell the health of the pair whether pages have arrived. Any attempt may tell that they have."""
    if pair.prefill is None or pair.decode is None:
        return False
    registry, key, is_probe = flight.pool.registry, PairKey(pair.prefill, pair.decode), flight.is_probe
    if flight.is_prefilled:
        registry.transfer_succeeded(key, is_probe=is_probe)
    elif is_probe:
        registry.ends_probe(key)
    flight.is_probe = False
    return is_probe


def _release(flight: InFlightRequest, pair: WorkerPair) -> bool:
    flight.has_reserved_nodes = False
    flight.pool.registry.set_reserved(pair.nodes, False)
    return True
