"""The front process: gRPC, limits, tokenizing, text, health. Never imports torch."""
