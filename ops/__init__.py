"""The operator's side: command line, demo, model preparation, benchmarks. Talks gRPC, never imports daemon."""
