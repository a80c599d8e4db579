"""What every test finds: one compute thread, the embedded model where it is fetched, a short private folder."""

import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from ops.model.catalog import SMOLLM2, model_path
from ops.model.fetch import find_damage

# Before torch is imported anywhere: tests run side by side, and each sets more threads where its subject is threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the front sets it for its engine
# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every program that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """Folder of SmolLM2; without it the test is skipped, or fails where DOWNCORE_REQUIRE_MODEL is set (make test)."""
    folder = model_path(SMOLLM2)
    damage = find_damage(SMOLLM2, folder, full=False)
    if damage is not None:
        if os.environ.get("DOWNCORE_REQUIRE_MODEL"):
            pytest.fail(f"the embedded model is not there: {damage}; run downcore model fetch")
        pytest.skip(f"the embedded model is not there: {damage}")
    return folder


@pytest.fixture
def socket_folder() -> Generator[Path]:
    """A private folder with a path short enough for a Unix socket (107 bytes)."""
    folder = Path(tempfile.mkdtemp(prefix="dc-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
