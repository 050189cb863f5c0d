"""Certificates for tests, made with ``openssl``."""

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """A certificate that is its own root, for localhost and 127.0.0.1."""

    cert: Path
    key: Path

    @property
    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.cert))

    @property
    def options(self) -> dict[str, str]:
        return {"tls_cert": str(self.cert), "tls_key": str(self.key)}


def make_certificate(folder: Path, *more: str) -> Certificate:
    made = Certificate(folder / "cert.pem", folder / "key.pem")
    openssl = shutil.which("openssl")
    assert openssl is not None, "openssl is needed to make certificates"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2",
         "-subj", "/CN=localhost", "-addext", names, "-keyout", str(made.key), "-out", str(made.cert),
         *(more or ("-nodes",))],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


def make_chain(folder: Path) -> Certificate:
    """A certificate followed by its authority's. Both lack extensions that RFC 5280 demands."""
    made = Certificate(folder / "chain.pem", folder / "key.pem")
    ours, authority, authority_key = (folder / name for name in ("ours.pem", "authority.pem", "authority_key.pem"))
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for command in (
        ["req", "-x509", *new, "-subj", "/CN=authority", "-keyout", authority_key, "-out", authority],
        ["req", *new, "-subj", "/CN=localhost", "-keyout", made.key, "-out", ours],
        ["x509", "-req", "-in", ours, "-CA", authority, "-CAkey", authority_key, "-set_serial", "1", "-out", made.cert],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    made.cert.write_text(made.cert.read_text() + authority.read_text())
    return made


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))
