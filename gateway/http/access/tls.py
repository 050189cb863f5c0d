"""TLS of the HTTP server."""

import os
import ssl
from pathlib import Path

from common.errors import ConfigError
from gateway.http.access.secret_files import warn_of_open_file


def make_tls_context(cert: str, key: str) -> ssl.SSLContext:
    """A context for TLS 1.2 and later.

    Args:
        cert: file with the certificate, followed by those that link it to a root.
        key: file with its private key.

    Raises ConfigError: a file cannot be read, is not PEM, is encrypted, or the two do not belong together.
    """
    for flag, path in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            # Opened a second time, a named pipe is empty. A pipe of the shell, <(...), has no real path, and works.
            if Path(os.path.realpath(path)).is_fifo():
                raise ConfigError(f"{flag} {path} is a named pipe; name a regular file")
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None
        if flag == "--tls-key":
            warn_of_open_file(f"{flag} {path}", mode)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key} cannot be used: {reason}; both must be PEM and belong together"
        ) from None
    return context


def _refuse_password() -> str:
    raise ConfigError("--tls-key is encrypted; give a key without a password, in a file that only you can read")
