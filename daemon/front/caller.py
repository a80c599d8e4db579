"""Who calls. Callers are not told apart before there is authentication, so all of them share one namespace."""

from typing import Any

DEFAULT_NAMESPACE = "default"


def namespace_of(context: Any) -> str:
    """The namespace whose prefixes the caller of this context reads and writes. No request can choose another."""
    return DEFAULT_NAMESPACE
