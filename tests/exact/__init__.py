"""Bytes, not closeness: cached equals cold in the real engine, across processes."""
