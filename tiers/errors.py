"""Operating errors of the tiers that a caller can act on."""


class StoreError(Exception):
    """The disk tier cannot do what was asked."""


class StoreLocked(StoreError):
    """Another process has the directory."""


class StoreUnusable(StoreError):
    """The directory cannot be opened: not ours, not writable, or failing."""


class StoreFull(StoreError):
    """The quota has no room. `missing_bytes` would have to be deleted first."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(f"the quota lacks {missing_bytes} bytes")
        self.missing_bytes = missing_bytes


class StoreDegraded(StoreError):
    """The disk fails or is too slow; it is tried again later. Nothing of the call was kept."""
