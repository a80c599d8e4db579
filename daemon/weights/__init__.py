"""Reading checkpoints: configuration, header checks, and tensors streamed straight into a model's parameters."""
