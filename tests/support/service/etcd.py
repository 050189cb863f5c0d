"""A real etcd with one member, for tests of discovery."""

import http.client
import shutil
import subprocess
import time
from pathlib import Path

from support.service.processes import free_port

IS_INSTALLED = shutil.which("etcd") is not None
START_TIMEOUT_S = 60.0


class EtcdServer:
    """Keeps its data in ``folder``, so that it may be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        peers = f"http://127.0.0.1:{self._peer_port}"
        self._folder.mkdir(exist_ok=True)
        options = {
            "data-dir": self._folder / "data", "listen-client-urls": self.url, "advertise-client-urls": self.url,
            "listen-peer-urls": peers, "initial-advertise-peer-urls": peers, "initial-cluster": f"default={peers}",
        }  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            argv = ["etcd", *(f"--{name}={value}" for name, value in options.items())]
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        ends = time.monotonic() + START_TIMEOUT_S
        while not self._is_healthy():
            assert self._process.poll() is None and time.monotonic() < ends, (self._folder / "log").read_text()
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None
