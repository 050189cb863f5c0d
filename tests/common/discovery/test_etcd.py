"""Announcements in a real etcd, and what nodes read there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.gateway.certificates import make_certificate
from support.service.etcd import IS_INSTALLED, EtcdServer
from support.service.processes import free_port
from support.waiting import until

from common.config.discovery import DiscoveryOptions
from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.discovery.announcement import GATEWAYS, Announcement
from common.discovery.etcd import EtcdError, EtcdStore
from common.discovery.gateway_directory import EtcdGateways
from common.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_INSTALLED, reason="needs etcd (Debian: etcd-server)")]

FIRST, SECOND, THIRD = "127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.kill()


def store(*urls: str, prefix: str = "/test") -> EtcdStore:
    return EtcdStore(DiscoveryOptions(etcd=",".join(urls), etcd_prefix=prefix))


def test_a_directory_has_what_is_announced_and_not_what_is_taken_back(etcd: EtcdServer) -> None:
    with EtcdGateways(store(etcd.url), NodeConfig().check_gateway) as directory:
        first, second = (Announcement(store(etcd.url), address) for address in (FIRST, SECOND))
        until(lambda: directory.addresses() == (FIRST, SECOND))
        first.close()
        until(lambda: directory.addresses() == (SECOND,))
        second.close()
        until(lambda: directory.addresses() == ())


def test_prefixes_separate_services(etcd: EtcdServer) -> None:
    announcement = Announcement(store(etcd.url, prefix="/test"), FIRST)
    until(lambda: store(etcd.url, prefix="/test").values(GATEWAYS) == (FIRST.encode(),))
    assert store(etcd.url, prefix="/test/more").values(GATEWAYS) == ()
    assert store(etcd.url, prefix="/tes").values(GATEWAYS) == ()
    announcement.close()


def test_a_key_vanishes_with_its_lease(etcd: EtcdServer) -> None:
    keys = store(etcd.url)
    lease = keys.put(GATEWAYS, FIRST, FIRST, ttl_s=5)
    assert keys.values(GATEWAYS) == (FIRST.encode(),)
    until(lambda: keys.values(GATEWAYS) == ())
    until(lambda: not keys.renew(lease))


def test_an_announcement_comes_back_after_etcd_has_lost_everything(etcd: EtcdServer, tmp_path: Path) -> None:
    announcement = Announcement(store(etcd.url), FIRST)
    until(lambda: store(etcd.url).values(GATEWAYS))
    etcd.kill()
    (tmp_path / "etcd" / "data").rename(tmp_path / "etcd" / "lost")
    etcd.start()
    until(lambda: store(etcd.url).values(GATEWAYS) == (FIRST.encode(),))
    announcement.close()


def test_addresses_stand_while_etcd_is_away(etcd: EtcdServer, caplog: pytest.LogCaptureFixture) -> None:
    store(etcd.url).put(GATEWAYS, FIRST, FIRST, ttl_s=600)
    with EtcdGateways(store(etcd.url), NodeConfig().check_gateway) as directory:
        until(lambda: directory.addresses() == (FIRST,))
        etcd.kill()
        until(lambda: "etcd does not answer" in caplog.text)
        assert directory.addresses() == (FIRST,)


def test_another_member_answers_for_one_that_is_away(etcd: EtcdServer) -> None:
    keys = store(f"http://127.0.0.1:{free_port()}", etcd.url)
    keys.put(GATEWAYS, FIRST, FIRST, ttl_s=60)
    assert keys.values(GATEWAYS) == (FIRST.encode(),)


def test_a_cluster_of_three_serves_with_two_and_comes_back_from_one(tmp_path: Path) -> None:
    peers = {f"etcd-{number}": free_port() for number in range(3)}
    members = [EtcdServer(tmp_path / name, name=name, peers=peers) for name in peers]
    urls = [member.url for member in members]
    try:
        for member in members:
            member.begin()
        for member in members:
            member.wait_until_healthy()
        with EtcdGateways(store(*urls), NodeConfig().check_gateway) as directory:
            first = Announcement(store(*urls), FIRST)
            until(lambda: directory.addresses() == (FIRST,))
            members[0].kill()
            second = Announcement(store(*urls), SECOND)
            until(lambda: directory.addresses() == (FIRST, SECOND))
            members[1].kill()
            third = Announcement(store(*urls), THIRD)
            with pytest.raises(EtcdError):
                store(*urls).values(GATEWAYS)
            assert directory.addresses() == (FIRST, SECOND)
            members[0].start()
            until(lambda: directory.addresses() == (FIRST, SECOND, THIRD))
            for announcement in (first, second, third):
                announcement.close()
            until(lambda: directory.addresses() == ())
    finally:
        for member in members:
            member.kill()


def test_etcd_with_tls_is_trusted_by_its_authority_and_knows_its_clients_by_their_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, other = make_certificate(tmp_path), tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(make_certificate(other).cert))
    server = EtcdServer(tmp_path / "etcd", certificate)
    ca, cert, key = str(certificate.cert), str(certificate.cert), str(certificate.key)
    try:
        server.start()
        known = EtcdStore(DiscoveryOptions(etcd=server.url, etcd_ca=ca, etcd_cert=cert, etcd_cert_key=key))
        known.put(GATEWAYS, FIRST, FIRST, ttl_s=60)
        assert known.values(GATEWAYS) == (FIRST.encode(),)
        with pytest.raises(EtcdError):
            EtcdStore(DiscoveryOptions(etcd=server.url, etcd_ca=ca)).values(GATEWAYS)
        with pytest.raises(EtcdError, match="certificate verify failed"):
            EtcdStore(DiscoveryOptions(etcd=server.url, etcd_cert=cert, etcd_cert_key=key)).values(GATEWAYS)
    finally:
        server.kill()


def test_addresses_to_which_a_node_must_not_connect_are_ignored(
    etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that can write to etcd cannot make a node without keys speak to another machine."""
    keys = store(etcd.url)
    for address in ("10.1.2.3:8001", "nonsense", "x" * 10_000, "http://127.0.0.1:8001", "*:8001", FIRST):
        keys.put(GATEWAYS, address[:20], address, ttl_s=60)
    keys.put(GATEWAYS, "the same again", FIRST, ttl_s=60)
    with EtcdGateways(keys, NodeConfig().check_gateway) as directory:
        until(lambda: directory.addresses() == (FIRST,))
    assert "10.1.2.3:8001 is on another machine" in caplog.text
    assert "must be HOST:PORT" in caplog.text


def test_what_does_not_answer_like_etcd_is_an_error() -> None:
    with pytest.raises(EtcdError, match=r"127\.0\.0\.1"):
        store(f"http://127.0.0.1:{free_port()}").values(GATEWAYS)


@contextmanager
def answering(status: int, answer: bytes) -> Iterator[EtcdStore]:
    """A store at a server that gives one answer to all requests."""

    class Strange(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Strange) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield store(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("answer", [b"null", b"{", b"text"])
def test_an_answer_that_etcd_never_gives_is_an_error(answer: bytes) -> None:
    with answering(200, answer) as keys:
        for call in (
            lambda: keys.values(GATEWAYS),
            lambda: keys.put(GATEWAYS, "a", "b", ttl_s=1),
            lambda: keys.renew(1),
        ):
            with pytest.raises(EtcdError):
                call()


def test_a_refusal_says_what_etcd_says() -> None:
    said = "etcdserver: mvcc: database space exceeded"
    with answering(429, f'{{"error":"{said}","message":"{said}","code":8}}'.encode()) as keys:
        with pytest.raises(EtcdError, match=rf": {said}$"):
            keys.put(GATEWAYS, "a", "b", ttl_s=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"etcd": "http://host:1", "control_host": "*", "insecure": True}, "--advertise-control-host"),
        ({"etcd": "http://host:1", "control_host": "0.0.0.0", "insecure": True}, "--advertise-control-host"),
        (
            {"etcd": "http://host:1", "advertise_control_host": "http://gateway"},
            "--advertise-control-host http://gateway",
        ),
        ({"advertise_control_host": "10.0.0.1"}, "needs --etcd"),
    ],
)
def test_a_gateway_announces_only_what_nodes_can_dial(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GatewayConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"etcd": "10.0.0.5:2379"}, "--etcd must be URLs"),
        ({"etcd": "http://host"}, "--etcd must be URLs"),
        ({"etcd": "http://root:secret@host:1"}, "--etcd takes no user names and passwords; use --etcd-cert"),
        ({"etcd": "http://host:99999"}, "--etcd must be URLs"),
        ({"etcd": "http://host:1", "etcd_prefix": "baton"}, "--etcd-prefix must begin"),
        ({"etcd": "http://host:1", "etcd_cert": "file"}, "go together"),
        ({"etcd_ca": "file"}, "--etcd-ca needs --etcd"),
        ({"etcd_prefix": "/mine"}, "--etcd-prefix needs --etcd"),
        ({"etcd": "http://host:1", "gateway": "127.0.0.1:9"}, "--gateway and --etcd"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NodeConfig(**options)  # type: ignore[arg-type]
