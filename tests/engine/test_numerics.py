"""The numerics profile differs wherever the same prompt may give other bytes."""

import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch

import daemon.layers
import daemon.models
import daemon.weights
import kernels
from daemon.engine import start

CPU = torch.device("cpu")
CORE = "processor\t: {}\nvendor_id\t: A\nmodel\t\t: 143\ncpu MHz\t\t: {}\nflags\t\t: avx2 {}\n\n"


@pytest.mark.parametrize("package", [kernels, daemon.layers, daemon.models, daemon.weights])
def test_it_changes_with_every_source_that_bytes_depend_on(
    package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = start._numerics_profile(torch.float32, CPU)
    copy = tmp_path / "copy"
    shutil.copytree(package.__path__[0], copy)
    monkeypatch.setattr(package, "__path__", [str(copy)])
    assert start._numerics_profile(torch.float32, CPU) == before
    changed = max(copy.glob("*.py"), key=lambda path: path.stat().st_size)
    changed.write_text(changed.read_text() + "\n# another way\n")
    assert start._numerics_profile(torch.float32, CPU) != before


def test_it_changes_with_a_table_of_launch_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(kernels.__path__[0], copy)
    monkeypatch.setattr(kernels, "__path__", [str(copy)])
    before = start._numerics_profile(torch.float32, CPU)
    (copy / "tables" / "sm_00.json").write_text("{}")
    assert start._numerics_profile(torch.float32, CPU) != before


def test_it_changes_with_the_processor_and_not_with_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(start, "CPU_INFO", info)
    profiles: list[bytes] = []
    for clock, extension in ((2000, "amx_bf16"), (3000, "amx_bf16"), (2000, "avx512f")):
        info.write_text(CORE.format(0, clock, extension) + CORE.format(1, clock + 7, extension))
        profiles.append(start._numerics_profile(torch.float32, CPU))
    assert profiles[0] == profiles[1] != profiles[2]
    info.unlink()
    assert start._numerics_profile(torch.float32, CPU) not in profiles
