"""Who calls, as methods see it: a principal, its namespace, and what it may queue.

What must hold: no request chooses a namespace. It comes from the caller's identity, and a request can only narrow it.
"""

from typing import Any

from daemon.errors import ErrorReason, RequestError
from daemon.front.held import Holding
from daemon.front.limits import OpenCall, QueuedTokens, Use
from daemon.front.principals import Principal, Scope


def local_principal(namespace: str) -> Principal:
    """Whoever reaches a listener that only the daemon's own user can reach."""
    return Principal(name="local", scopes=tuple(Scope), namespace=namespace)


class Call:
    """One call: gRPC's context, which answers for all that is not named here, and who is at its other end."""

    __slots__ = ("_context", "_opened", "_use", "held", "principal", "write")

    def __init__(self, context: Any, principal: Principal, use: Use, held: Holding, opened: OpenCall | None) -> None:
        self._context = context
        self._opened = opened
        self._use = use
        self.held = held  # its request's bytes, and what it makes of them
        self.principal = principal
        self.write = context.write  # for every message of a stream: found at once

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    @property
    def ended(self) -> RequestError | None:
        """Why it was cancelled, where that was here and not at its client's end."""
        return self._opened.ended if self._opened is not None else None

    def queue(self, num_tokens: int) -> QueuedTokens:
        """Counts a prompt as queued until it is released. Raises RequestError where that passes the caller's limit."""
        return self._use.queue(self.principal, num_tokens)


def owner_of(call: Any) -> str:
    """Whose a request or a job of this call is: ids and keys are known within its caller's own namespace alone."""
    return call.principal.own_namespace


def namespace_of(call: Any, asked: str = "") -> str:
    """The namespace whose prefixes this call reads and writes: the caller's own, or a part of it that it asks for.

    Raises:
        RequestError: it asks for another's.
    """
    own: str = call.principal.own_namespace
    if is_part(asked, own):
        return asked or own
    raise RequestError(
        ErrorReason.PERMISSION_DENIED, "is neither the caller's own namespace nor a part of it", field="namespace"
    )


def is_part(namespace: str, own: str) -> bool:
    """Whether a namespace is this one or below it; an empty one is not told, and so is."""
    return namespace in ("", own) or namespace.startswith(own + "/")


def readable_namespace_of(call: Any, asked: str = "") -> str:
    """As `namespace_of`, but an operator may look into, and evict from, any."""
    if asked and Scope.ADMIN in call.principal.scopes:
        return asked
    return namespace_of(call, asked)
