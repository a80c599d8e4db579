"""What README and ops/docs tell people to type, typed."""
