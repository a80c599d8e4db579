"""Who may call: principals with their scopes, namespaces, limits and credentials, as one TOML file says.

A principal is known by the subject alternative names of its certificates or by tokens, of which the file holds hashes.
What must hold: a credential names one principal or none; a principal reaches its own namespace and those below it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import msgspec

from daemon.errors import ErrorReason, RequestError
from daemon.front.tokens import NOBODY, Token, TokenHash
from daemon.front.watched import UnusableFile, read_file

MAX_FILE_BYTES = 4 << 20
MAX_TOKENS = 8  # of one principal: each is compared with
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
MAX_NAMESPACE_CHARS = 128


class Scope(StrEnum):
    """What a principal may do. None implies another."""

    GENERATE = "generate"
    WARM = "warm"  # look into the cache, warm, pin and evict, in its own namespace
    ADMIN = "admin"  # see all, end things, set quotas, drain


class TokenEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One token of a principal. `expires` needs a time zone; without it the token is good until it is taken out."""

    hash: str
    expires: datetime | None = None


class Principal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[principals]]` table. A limit that is absent is none."""

    name: str
    scopes: tuple[Scope, ...]
    namespace: str = ""  # its own name unless told
    certificates: tuple[str, ...] = ()  # URIs and DNS names
    tokens: tuple[TokenEntry, ...] = ()
    max_requests: int | None = None  # calls at a time, streams included
    max_queued_tokens: int | None = None  # of prompts whose first token is still to come
    cached_bytes: int | None = None  # of its namespace and those below
    pinned_bytes: int | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} must match {_NAME.pattern}")
        if self.namespace and not is_namespace(self.namespace):
            raise ValueError(f"namespace {self.namespace!r} of {self.name} must match {_NAMESPACE.pattern}")
        if len(self.tokens) > MAX_TOKENS:
            raise ValueError(f"{self.name} has {len(self.tokens)} tokens; at most {MAX_TOKENS} are allowed")
        for limit in ("max_requests", "max_queued_tokens", "cached_bytes", "pinned_bytes"):
            value = getattr(self, limit)
            if value is not None and not 0 <= value <= 1 << 50:
                raise ValueError(f"{limit} of {self.name} must be from 0 to 2**50, not {value}")
        for entry in self.tokens:
            TokenHash.parse(entry.hash)
            if entry.expires is not None and entry.expires.tzinfo is None:
                raise ValueError(f"expires of a token of {self.name} needs a time zone, such as Z")

    @property
    def own_namespace(self) -> str:
        return self.namespace or self.name


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    principals: tuple[Principal, ...] = ()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls, and by what it is known. `expires_s` is Unix time; None: when its credential is taken out."""

    principal: Principal
    credential: str  # the token's hash, or the certificate's name
    expires_s: float | None = None


class Directory:
    """All principals, found by their credentials. Never changes; a file that is read again makes a new one.

    Raises:
        ValueError: a name, certificate or namespace's quota stands in it twice and differs.
    """

    def __init__(self, principals: Iterable[Principal]) -> None:
        self.principals: dict[str, Principal] = {}
        self._by_certificate: dict[str, Principal] = {}
        self._hashes: dict[str, tuple[tuple[TokenEntry, TokenHash], ...]] = {}
        self.quotas: dict[str, tuple[int | None, int | None]] = {}  # cached and pinned bytes, by namespace
        for principal in principals:
            if principal.name in self.principals:
                raise ValueError(f"two principals are named {principal.name}")
            self.principals[principal.name] = principal
            self._hashes[principal.name] = tuple((entry, TokenHash.parse(entry.hash)) for entry in principal.tokens)
            for name in map(_canonical, principal.certificates):
                if name in self._by_certificate:
                    raise ValueError(f"certificate {name} names {principal.name} and another")
                self._by_certificate[name] = principal
            quota = (principal.cached_bytes, principal.pinned_bytes)
            if quota != (None, None) and self.quotas.setdefault(principal.own_namespace, quota) != quota:
                raise ValueError(f"namespace {principal.own_namespace} has two quotas")

    def by_token(self, text: str, now_s: float) -> Identity:
        """The principal whose token this is. Raises RequestError where it is nobody's, or no longer good."""
        token = Token.parse(text)
        known = self._hashes.get(token.name, ()) if token is not None else ()
        secret = token.secret if token is not None else ""
        found: TokenEntry | None = None
        for entry, kept in known or ((None, NOBODY),):  # all of them: the time says nothing of which it was
            if kept.matches(secret):
                found = entry
        if token is None or found is None:
            raise RequestError(ErrorReason.UNAUTHENTICATED, "the token is not known here")
        expires_s = found.expires.timestamp() if found.expires is not None else None
        if expires_s is not None and now_s >= expires_s:
            raise RequestError(ErrorReason.UNAUTHENTICATED, "the token has expired")
        return Identity(self.principals[token.name], found.hash, expires_s)

    def by_certificate(self, names: Iterable[str]) -> Identity:
        """The principal of a verified certificate with these alternative names.

        Raises:
            RequestError: none of them is known, or they are of several principals.
        """
        found = {name: self._by_certificate[name] for name in map(_canonical, names) if name in self._by_certificate}
        if not found:
            raise RequestError(ErrorReason.UNAUTHENTICATED, "the certificate names no principal")
        if len({principal.name for principal in found.values()}) > 1:
            raise RequestError(ErrorReason.UNAUTHENTICATED, "the certificate names several principals")
        credential, principal = next(iter(found.items()))
        return Identity(principal, credential)

    def still_knows(self, identity: Identity, now_s: float) -> bool:
        """Whether the same credential still stands for the same rights."""
        principal = self.principals.get(identity.principal.name)
        if principal is None or (identity.expires_s is not None and now_s >= identity.expires_s):
            return False
        kept = {entry.hash for entry in principal.tokens} | set(map(_canonical, principal.certificates))
        same = (principal.scopes, principal.own_namespace) == (
            identity.principal.scopes, identity.principal.own_namespace
        )  # fmt: skip
        return same and identity.credential in kept


def is_namespace(text: str) -> bool:
    """Names separated by slashes."""
    return len(text) <= MAX_NAMESPACE_CHARS and _NAMESPACE.fullmatch(text) is not None


def read_principals(path: Path) -> Directory:
    """The file's principals.

    Raises:
        UnusableFile: it cannot be read, others than its owner may write it, or something in it is wrong.
    """
    content, mode = read_file(path, MAX_FILE_BYTES)
    if mode & 0o022:
        raise UnusableFile(f"{path} may be written by others than its owner; chmod 600 it")
    try:
        return Directory(msgspec.toml.decode(content, type=_File).principals)
    except ValueError as error:  # msgspec's and tomllib's are ones
        raise UnusableFile(f"{path}: {error}") from None


def _canonical(name: str) -> str:
    """DNS names have no case; a URI is compared as it stands."""
    return name if "://" in name else name.lower()
