"""A real etcd, of one member or several, for tests of discovery."""

import http.client
import shutil
import ssl
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from support.gateway.certificates import Certificate
from support.service.processes import free_port

IS_INSTALLED = shutil.which("etcd") is not None
START_TIMEOUT_S = 180.0


class EtcdServer:
    """Keeps its data in ``folder``, so that it may be stopped and started again.

    Args:
        certificate: of the server, and the only one that it takes of clients; it speaks plain HTTP without one.
        name, peers: of this member, and the port of every member for the others; by default it is the only one.
    """

    def __init__(
        self,
        folder: Path,
        certificate: Certificate | None = None,
        *,
        name: str = "default",
        peers: Mapping[str, int] | None = None,
    ) -> None:
        self._folder = folder
        self._certificate = certificate
        self._name = name
        self._peers = {other: f"http://127.0.0.1:{port}" for other, port in (peers or {name: free_port()}).items()}
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self._port}"

    def start(self) -> None:
        self.begin()
        self.wait_until_healthy()

    def begin(self) -> None:
        """Start it without waiting: a member is healthy once most of them run."""
        mine = self._peers[self._name]
        self._folder.mkdir(exist_ok=True)
        options = {
            "name": self._name, "data-dir": self._folder / "data", "listen-client-urls": self.url,
            "advertise-client-urls": self.url, "listen-peer-urls": mine, "initial-advertise-peer-urls": mine,
            "initial-cluster": ",".join(f"{name}={url}" for name, url in self._peers.items()),
        }  # fmt: skip
        if (certificate := self._certificate) is not None:
            options |= {"cert-file": certificate.cert, "key-file": certificate.key}
            options |= {"client-cert-auth": "true", "trusted-ca-file": certificate.cert}
        with (self._folder / "log").open("ab") as log:
            argv = ["etcd", *(f"--{name}={value}" for name, value in options.items())]
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)

    def wait_until_healthy(self) -> None:
        assert self._process is not None
        ends = time.monotonic() + START_TIMEOUT_S
        while not self._is_healthy():
            assert self._process.poll() is None and time.monotonic() < ends, (self._folder / "log").read_text()
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        connection = self._connection()
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._certificate is None:
            return http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        context: ssl.SSLContext = self._certificate.client_context
        context.load_cert_chain(self._certificate.cert, self._certificate.key)
        return http.client.HTTPSConnection("127.0.0.1", self._port, timeout=5, context=context)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None
