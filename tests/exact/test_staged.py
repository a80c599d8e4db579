"""Planes brought together layer by layer, as on an accelerator, with the CPU in its place: the same bytes.

Streams and events do nothing here, where work is done when its call returns; tests/exact/test_gpu.py has them.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.exact.families import GRID, config_of, prompt_of
from tests.exact.longctx import LongProbe, small_device
from tiers.staged import Stager

LENGTH, MAX_TOKENS = 26 * GRID - 1, GRID + 3


class Moment:
    """Stands for an event and for a stream."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, event: "Moment") -> None: ...

    def elapsed_time(self, later: "Moment") -> float:
        return 1.0


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "Stream", Moment)
    monkeypatch.setattr(torch.cuda, "current_stream", Moment)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def move_rows(source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor) -> None:
    target[target_ids] = source[source_ids]


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize(
    ("family", "tier"),
    [
        ("llama", "host"),
        ("qwen3_5_moe", "host"),
        ("kimi_linear", "spill"),
        ("glm5_next", "host"),
        ("qwen4_exp", "spill"),
    ],
)
def test_a_staged_forward_gives_the_bytes_of_a_resident_one(family: str, tier: str, tmp_path: Path) -> None:
    models, prompt = tmp_path / "models", prompt_of(LENGTH, LENGTH)
    resident = LongProbe(config_of(family, models, "bfloat16"))
    draws = resident.serve(prompt, MAX_TOKENS)
    resident.engine.close()
    probe = LongProbe(small_device(family, models, "bfloat16", 0.0, tier=tier, folder=tmp_path / "below"))
    sources = probe.engine.runner.sources
    assert sources is not None
    probe.engine.runner.stager = Stager(sources, move_rows)
    found = probe.serve(prompt, MAX_TOKENS)
    assert found == draws
    below = [residence.host + residence.spill for residence in probe.residences]
    assert min(below) > 0, "everything was resident"
    assert probe.most_read_bytes > 0
    probe.engine.close()
