"""downcore model check: sizes from configuration and headers, by a process that reads no weights."""

import json
import shutil
from pathlib import Path

import pytest

from ops.cli.errors import ExitCode
from ops.cli.main import run
from ops.models.shipped import TINY_HYBRID

CONFIGS = Path(__file__).parent.parent / "models" / "configs"


def test_the_shipped_model_is_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["model", "check", str(TINY_HYBRID), "--pool-bytes", str(1 << 28), "-o", "json"])
    assert code == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    assert (report["num_parameters"], report["bytes_per_token"], report["slot_bytes"]) == (17_676_204, 1_536, 926_208)
    assert report["budget"]["pool_bytes"] == 1 << 28
    assert report["weights"]["num_tensors"] == 161


def test_a_configuration_without_weights_is_told_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(CONFIGS / "kimi_linear_48b.json", tmp_path / "config.json")
    code = run(["model", "check", str(tmp_path), "--pool-bytes", str(64 << 30), "--max-sequences", "16"])
    assert code == ExitCode.OK
    out = capsys.readouterr().out
    for text in ("49.1 B", "8,064 bytes", "43,417,600 fixed bytes", "none in the folder", "1,048,576"):
        assert text in out
    assert "SEQUENCES" in out


def test_what_cannot_be_served_fails_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "check", str(tmp_path / "none")]) == ExitCode.NOT_FOUND
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    assert run(["model", "check", str(tmp_path)]) == ExitCode.FAILED
    assert "'perceptron' is not supported" in capsys.readouterr().err
    assert run(["model", "check", str(tmp_path), "--pool-bytes", "0"]) == ExitCode.USAGE
