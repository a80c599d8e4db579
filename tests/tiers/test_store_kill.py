"""A fraction of the kill campaign: every named step twice, and some instants, with a seed that rotates by the day."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.campaigns.budget import first_seed
from tiers.files import Step

KILLS = 50  # of the campaign's 2,000


def test_a_killed_store_opens_with_all_that_was_committed(tmp_path: Path) -> None:
    result = tmp_path / "kill.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaigns.kill", "--kills", str(KILLS), "--result", str(result)],
        env={**os.environ, "DOWNCORE_SEED": str(first_seed())},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"seed {first_seed()}: {done.stderr[-3000:]}"
    figures = json.loads(result.read_text())
    assert figures["total_kills"] >= KILLS
    assert set(figures["steps"]) == {step.value for step in Step}, "every step was killed at"
    assert figures["records_compared"] > 10 * KILLS
