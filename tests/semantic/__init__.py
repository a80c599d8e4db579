"""Questions whose answers say whether the cache held the right bytes."""
