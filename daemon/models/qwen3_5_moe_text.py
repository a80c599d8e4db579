"""Qwen3.5-MoE without a vision tower: the same text model under the name that its checkpoints carry."""

from daemon.models.qwen3_5_moe import build

__all__ = ["build"]
