"""How a listener tells its callers apart: by token, by certificate, or as the daemon's own user."""

import time
from collections.abc import Iterable
from typing import Any

from daemon.errors import ErrorReason, RequestError
from daemon.front.principals import Directory, Identity, Principal
from daemon.front.watched import Watched

HEADER = "authorization"
SCHEME = "bearer "
_CERTIFICATE_NAMES = ("peer_uri", "peer_dns")  # alternative names of a certificate that the handshake has verified
NEEDS = "this needs a token, `authorization: Bearer TOKEN`"


class Door:
    """Of one listener.

    Args:
        directory: who may call; None where callers are not told apart.
        local: who comes without credentials; None where nobody may.
        sees_certificates: the listener has every client show one.
    """

    def __init__(
        self, directory: Watched[Directory] | None, local: Principal | None, *, sees_certificates: bool
    ) -> None:
        assert directory is not None or local is not None
        self._directory = directory
        self._local = local
        self._sees_certificates = sees_certificates

    def check_early(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Before a request is read: raises RequestError where its headers are enough to refuse it."""
        if self._directory is not None:
            token = _bearer(metadata)
            if token is not None:
                self._directory.value.by_token(token, time.time())
            elif self._local is None and not self._sees_certificates:
                raise RequestError(ErrorReason.UNAUTHENTICATED, NEEDS)

    def identify(self, context: Any) -> Identity | Principal:
        """Who calls: by a credential, or the local principal. A token comes before a certificate.

        Raises:
            RequestError: nobody known.
        """
        if self._directory is None:
            assert self._local is not None
            return self._local
        token = _bearer(context.invocation_metadata())
        if token is not None:
            return self._directory.value.by_token(token, time.time())
        if self._sees_certificates:
            seen = context.auth_context()
            return self._directory.value.by_certificate(
                name.decode("utf-8", "replace") for kind in _CERTIFICATE_NAMES for name in seen.get(kind, ())
            )
        if self._local is None:
            raise RequestError(ErrorReason.UNAUTHENTICATED, NEEDS)
        return self._local


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token that came with a call, if any; raises RequestError where there are two, or another kind."""
    found = [value for key, value in metadata or () if key == HEADER]
    if not found:
        return None
    (value, *more) = found
    if more or not isinstance(value, str) or not value.lower().startswith(SCHEME):
        raise RequestError(ErrorReason.UNAUTHENTICATED, NEEDS)
    return value[len(SCHEME) :].strip()
