"""Package downcore.v1 of the wire."""
