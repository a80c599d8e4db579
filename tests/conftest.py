"""What every test finds: one compute thread, the embedded model where it is fetched, a short private folder."""

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from ops.model.catalog import SMOLLM2, model_path
from ops.model.fetch import find_damage

# Before torch is imported anywhere: tests run side by side, and each sets more threads where its subject is threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the front sets it for its engine

# Files of few long tests. They go first, so that no worker is left with one at the end while the others are done.
LONG = (
    "tests/engine/test_unified.py",
    "tests/exact/test_exact.py",
    "tests/semantic/test_answers.py",
    "tests/kernels/gpu/test_interpreted.py",
    "tests/kernels/gpu/test_compiled.py",
    "tests/exact/test_lower_tiers.py",
    "tests/parity/test_smollm2.py",
    "tests/semantic/test_corruption.py",
    "tests/semantic/test_tiers.py",
    "tests/front/test_memory.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.location[0]) if item.location[0] in LONG else len(LONG))


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
