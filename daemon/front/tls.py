"""The certificate that TCP listeners show, and the authority whose clients they let in; both may change at any time.

A new connection sees the newest files; those that are open keep what they were made with, for at most
MAX_CONNECTION_AGE_S (listeners.py).
"""

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc

from daemon.front.watched import UnusableFile, Watched, read_file

MAX_PEM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the PEM files are. With a `client_ca` every client must show a certificate of it."""

    cert: Path
    key: Path
    client_ca: Path | None

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)


class Tls:
    """The newest usable certificate.

    Raises:
        UnusableFile: a file cannot be read, key and certificate do not fit, the key needs a password, or others may
            read it.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._watched = Watched(files.paths, lambda: _load(files))

    def poll(self, *, force: bool = False) -> bool:
        """Looks for new files. Returns: whether there are any, in use from the next connection on."""
        return self._watched.poll(force=force)

    def credentials(self) -> grpc.ServerCredentials:
        """For one port: gRPC asks at each handshake of it, on a thread of its own, whether there is something new."""
        first, lock = self._watched.value, threading.Lock()
        shown = [first]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            with lock:
                newest = self._watched.value
                if newest is shown[0]:
                    return None
                shown[0] = newest
                return newest

        make: Any = grpc.dynamic_ssl_server_credentials  # its stub does not know that None means: as before
        return make(first, fetch, require_client_authentication=self.files.client_ca is not None)


def _load(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    cert, _ = read_file(files.cert, MAX_PEM_BYTES)
    key, mode = read_file(files.key, MAX_PEM_BYTES)
    if mode & 0o007:
        raise UnusableFile(f"{files.key} is open to other users; chmod 600 it")
    client_ca = read_file(files.client_ca, MAX_PEM_BYTES)[0] if files.client_ca is not None else None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key, password=lambda: _refuse_password(files.key))
        if files.client_ca is not None:
            context.load_verify_locations(files.client_ca)
    except (ssl.SSLError, OSError) as error:
        raise UnusableFile(f"{files.cert} and {files.key}: {error}") from None
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)


def _refuse_password(key: Path) -> NoReturn:
    """In place of OpenSSL's own question, which would stop the event loop until somebody answers at the terminal."""
    raise UnusableFile(f"{key} needs a password, which nobody is there to give: take it off the key")
