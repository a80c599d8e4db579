"""The embedded model: where it comes from, how it becomes a snapshot folder, where that folder lies."""
