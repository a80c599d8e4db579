"""Qwen3.5 without a vision tower: the same text model under the name that its checkpoints carry."""

from daemon.models.qwen3_5 import build

__all__ = ["build"]
