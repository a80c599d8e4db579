"""Pure functions over tensors: each operation's reference, its faster forms, and the checked wrapper."""
