"""Which blocks come to a tier and which leave it, written down for those namespaces that somebody watches.

While nobody watches, the tree has no watcher and nothing is kept or paid. What must hold: the copies that a namespace
has at one moment, and the events after it, give the copies that it has at any later one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tiers.tree import Node, PrefixTree

TIERS: dict[str, Callable[[Node], bool]] = {
    "device": lambda node: node.block_id is not None,
    "host": lambda node: node.host_block is not None,
    "disk": lambda node: node.disk_block is not None,
}


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A block's copy came to a tier, or left it: then it has no tokens."""

    tier: str  # one of TIERS
    key: bytes
    parent: bytes | None  # key of the block before it; None for a prefix's first block
    tokens: bytes  # as keys.token_bytes makes them


class BlockEvents:
    """The tree's watcher. Whoever owns it takes the events out now and then; they are as many as the changes."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._events: dict[str, list[BlockEvent]] = {}  # by namespace, for those watched

    @property
    def has_events(self) -> bool:
        return any(self._events.values())

    def watch(self, namespace: str) -> None:
        """Keeps a namespace's events from now on."""
        self._events.setdefault(namespace, [])
        self._tree.watcher = self._write_down

    def unwatch(self, namespace: str) -> None:
        """Keeps them no more, and drops what was not taken."""
        self._events.pop(namespace, None)
        if not self._events:
            self._tree.watcher = None

    def take(self, namespace: str) -> list[BlockEvent]:
        """The events since the last call, in order. The namespace is watched."""
        events = self._events[namespace]
        if events:
            self._events[namespace] = []
        return events

    def copies(self, namespace: str) -> list[BlockEvent]:
        """Every copy that a namespace has now, as the events that would bring it there: of each tier, in path order."""
        nodes = list(self._tree.nodes(namespace))
        return [_came(node, tier) for tier, has_block in TIERS.items() for node in nodes if has_block(node)]

    def _write_down(self, node: Node, tier: str, came: bool) -> None:
        events = self._events.get(node.namespace)
        if events is not None:
            events.append(_came(node, tier) if came else BlockEvent(tier, node.key, None, b""))


def _came(node: Node, tier: str) -> BlockEvent:
    above = node.parent
    assert above is not None, "a root has no block"
    return BlockEvent(tier, node.key, above.key if above.parent is not None else None, node.tokens)
