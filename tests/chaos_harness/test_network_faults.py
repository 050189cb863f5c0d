"""Faults of the network say what they have seen, and what they have found wrong."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.chaos_harness.faults import network
from scripts.chaos_harness.faults.base import Fault
from scripts.chaos_harness.faults.network import PairCut, Reset, Silence

BROKE = "the nixl connection to decode node decode-0 broke: reset\n"
OFFERED = "decode node decode-0 offers its pool again, in place of the nixl connection\n"
MISSED = "cannot receive pages from node prefill-0 now, retrying soon: the writer has detached\n"
ATTACHED = "sending pages to decode node decode-0 by tcp\n"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine so busy that the time is over before the logs are read."""
    monkeypatch.setattr(network, "SWITCH_S", 0.0)


def inject(
    fault: Fault,
    log: Path,
    said: str,
    *,
    decode_said: str = "",
    role: str = "prefill",
    ends: bool = False,
    hosts_do: str = "reset",
) -> tuple[str, Any]:
    """Return what the fault says after which the two nodes log this, and the site; ``hosts_do``: what it asks for."""
    decode_log = log.with_name("decode")
    for one in (log, decode_log):
        one.write_text("")
    peer = SimpleNamespace(name="prefill-0", role=role, data_port=1, log=log, num_starts=1, is_running=True, fault="")

    def reset(*_: object, **__: object) -> None:
        log.write_text(said)
        decode_log.write_text(decode_said)
        peer.num_starts += ends

    service = SimpleNamespace(workers=[peer], hosts=SimpleNamespace(**{hosts_do: reset, "has_relay": True}))
    site: Any = SimpleNamespace(service=service, problems=[], switches_s=[], since_faults_s=[])
    node: Any = SimpleNamespace(name="decode-0", log=decode_log, num_starts=1)
    return asyncio.run(fault.inject(site, node)), site


@pytest.mark.parametrize(
    ("said", "decode_said", "ends", "shown", "num_switches", "num_problems"),
    [
        (BROKE + ATTACHED, "", False, "pages go by tcp", 1, 0),
        (OFFERED + ATTACHED, "", False, "pages go by tcp", 1, 0),
        (ATTACHED, MISSED, False, "pages go by tcp", 1, 0),
        (ATTACHED, "", False, "no page was to be sent", 0, 0),
        (BROKE, "", False, "pages go by no transport", 0, 1),
        (BROKE, "", True, "pages go by no transport", 0, 0),
    ],
)
def test_a_pair_that_goes_on_by_no_transport_fails_the_run_unless_a_node_has_ended(
    tmp_path: Path, said: str, decode_said: str, ends: bool, shown: str, num_switches: int, num_problems: int
) -> None:
    text, site = inject(Reset(), tmp_path / "log", said, decode_said=decode_said, ends=ends)
    assert shown in text
    assert (len(site.switches_s), len(site.problems)) == (num_switches, num_problems)
    assert all(since >= took for since, took in zip(site.since_faults_s, site.switches_s, strict=True))


def test_a_pair_whose_connections_fall_silent_goes_on_by_new_ones(tmp_path: Path) -> None:
    lost = "the tcp connection to decode node decode-0 at 10.0.0.2 port 4001 broke: packets over it are lost\n"
    text, site = inject(Silence(), tmp_path / "log", lost + ATTACHED, hosts_do="silence")
    assert text.startswith("data connections from prefill-0 to decode-0 fell silent; pages go by tcp")
    assert (len(site.switches_s), site.problems) == (1, [])
    text, site = inject(Silence(), tmp_path / "log", "", hosts_do="silence")
    assert "no page was to be sent" in text and site.problems == []


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        (None, "needs --namespaces"),
        (SimpleNamespace(has_relay=False), "needs packets to go through the relay"),
        (SimpleNamespace(has_relay=True), ""),
    ],
)
def test_connections_fall_silent_only_where_packets_go_through_the_relay(hosts: object, why: str) -> None:
    site: Any = SimpleNamespace(service=SimpleNamespace(hosts=hosts))
    assert Silence.why_not(site).startswith(why) and bool(Silence.why_not(site)) == bool(why)


@pytest.mark.parametrize("fault", [Reset, PairCut, Silence])
def test_without_a_prefill_node_no_pair_is_cut(tmp_path: Path, fault: type[Fault]) -> None:
    text, site = inject(fault(), tmp_path / "log", "", role="decode")
    assert "there is no prefill node" in text
    assert site.problems == []
