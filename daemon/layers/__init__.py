"""Mixers, norms, MLPs and residual schemes, shared by the model families."""
