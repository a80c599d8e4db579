"""What an engine cannot start with is said in words that name the setting."""

from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.config import EngineConfig, LoadFormat
from daemon.engine import start
from tests.e2e.daemon import tiny_model

BLOCK, GRID = 16, 64


def said(folder: Path, **settings: object) -> str:
    """The StartError of a small model under these settings."""
    fixed = {"load_format": LoadFormat.DUMMY, "dtype": "float32", "block_size": BLOCK, "grid": GRID, "threads": 1}
    config = EngineConfig(str(tiny_model(folder)), **{**fixed, "pool_bytes": 1 << 20, **settings})  # type: ignore[arg-type]
    with pytest.raises(start.StartError) as caught:
        start.start(config, send=lambda message: None, progress=lambda done, total: None)
    return str(caught.value)


def test_a_tier_too_small_to_hold_anything_is_no_tier_that_is_silently_missing(tmp_path: Path) -> None:
    assert "host_bytes of 100 cannot hold a block" in said(tmp_path / "host", host_bytes=100)
    disk = {"disk_path": str(tmp_path / "tier")}
    assert "spill_bytes of 100 cannot hold a grid chunk" in said(tmp_path / "spill", spill_bytes=100, **disk)


def test_memory_and_files_that_are_not_to_be_had_are_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> Callable[..., None]:
        def fail(*args: object, **options: object) -> None:
            raise error

        return fail

    monkeypatch.setattr(start, "make_cache", fails(PermissionError(13, "Permission denied")))
    assert "Permission denied" in said(tmp_path / "files")
    monkeypatch.setattr(start, "DevicePools", fails(RuntimeError("can't allocate memory\nwith a trace")))
    assert said(tmp_path / "pool") == "pool_bytes: can't allocate memory"
