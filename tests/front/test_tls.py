"""Certificates and keys that the listeners are given."""

import subprocess
import sys
from pathlib import Path

from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.front.pki import Authority

LOAD = """
import sys
from pathlib import Path
from daemon.front.tls import Tls, TlsFiles
from daemon.front.watched import UnusableFile
try:
    Tls(TlsFiles(Path(sys.argv[1]), Path(sys.argv[2]), None))
except UnusableFile:
    sys.exit(3)
"""


def test_a_key_that_needs_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    cert, key = tmp_path / "server.crt", tmp_path / "server.key"
    Authority().issue("localhost").write(cert, key)
    command = [sys.executable, "-c", LOAD, str(cert), str(key)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0
    plain = load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    key.chmod(0o600)
    # Without a terminal it is standard input that would be asked.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as asked:
        try:
            assert asked.wait(20) == 3
            assert asked.stderr is not None
            assert b"pass phrase" not in asked.stderr.read()
        finally:
            asked.kill()
