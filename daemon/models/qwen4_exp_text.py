"""Qwen4 without a vision tower: the same text model under the name that its checkpoints carry."""

from daemon.models.qwen4_exp import build

__all__ = ["build"]
