"""What a user of the command line shows to the daemon: a token, a certificate; and how it knows the daemon.

They come from the environment, which the flags of ops/cli/main.py set as well: `downcore --token-file FILE status`.
"""

import ipaddress
import stat
from collections.abc import Mapping
from pathlib import Path

import grpc

from ops.cli.errors import CliError, ExitCode

TOKEN_FILE = "DOWNCORE_TOKEN_FILE"
TLS_CA = "DOWNCORE_TLS_CA"
TLS_CERT = "DOWNCORE_TLS_CERT"
TLS_KEY = "DOWNCORE_TLS_KEY"
SYSTEM_CA = "system"  # the authorities that this machine trusts anyway


def channel_credentials(target: str, environ: Mapping[str, str]) -> grpc.ChannelCredentials | None:
    """Credentials for a channel to `target`; None where there is nothing to show and no TLS.

    Raises:
        CliError: a file cannot be used, or a token would go over a network in the open.
    """
    token = _token(environ.get(TOKEN_FILE))
    channel = None if target.startswith("unix:") else _tls(environ)
    if token is None:
        return channel
    if channel is None:
        if not is_local(target):
            message = f"a token goes to {target} over TLS only: name its authority with --tls-ca or ${TLS_CA}"
            raise CliError(ExitCode.USAGE, message)
        kind = grpc.LocalConnectionType.UDS if target.startswith("unix:") else grpc.LocalConnectionType.LOCAL_TCP
        channel = grpc.local_channel_credentials(kind)
    return grpc.composite_channel_credentials(channel, grpc.access_token_call_credentials(token))


def is_local(target: str) -> bool:
    """Whether nothing leaves this machine on the way there."""
    if target.startswith("unix:"):
        return True
    host = target.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(path: str | None) -> str | None:
    if not path:
        return None
    text = _read("--token-file", path, is_secret=True).decode(errors="replace").strip()
    if not text.isascii() or not text.isprintable() or " " in text or not text:
        raise CliError(ExitCode.USAGE, f"--token-file {path}: holds no token")
    return text


def _tls(environ: Mapping[str, str]) -> grpc.ChannelCredentials | None:
    ca, cert, key = (environ.get(name) or None for name in (TLS_CA, TLS_CERT, TLS_KEY))
    if (cert is None) != (key is None):
        raise CliError(ExitCode.USAGE, "--tls-cert and --tls-key need each other")
    if ca is None and cert is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=None if ca in (None, SYSTEM_CA) else _read("--tls-ca", ca),
        private_key=None if key is None else _read("--tls-key", key, is_secret=True),
        certificate_chain=None if cert is None else _read("--tls-cert", cert),
    )


def _read(flag: str, path: str, *, is_secret: bool = False) -> bytes:
    """A file, which a flag or its variable names."""
    try:
        if is_secret and stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
            raise CliError(ExitCode.USAGE, f"{flag} {path}: open to other users; chmod 600 it")
        return Path(path).read_bytes()
    except OSError as error:
        raise CliError(ExitCode.USAGE, f"{flag} {path}: {error.strerror}") from None
