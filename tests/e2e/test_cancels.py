"""A fraction of the campaign `cancels`: whatever state a stream is cancelled in, its blocks come back, and soon."""

from pathlib import Path

from tests.campaigns.budget import first_seed
from tests.campaigns.cancels import FLAGS, MAX_P99_MS, WAYS, Cancels
from tests.e2e.daemon import crowd, running, tiny_model

FRACTION = 200  # of 100,000


def test_the_blocks_of_a_cancelled_stream_can_be_used_again_at_once(tmp_path: Path) -> None:
    with running(tmp_path, tiny_model(tmp_path / "model"), *FLAGS) as daemon:
        cancels = Cancels(daemon, first_seed())
        cancels.run(FRACTION, windows=2)
        found = cancels.figures
        print(f"{found.cancelled}, blocks back after ms: {sorted(round(ms, 1) for ms in found.back_ms)}")
        assert all(found.cancelled[way] for way in WAYS)
        assert found.cancelled.total() == FRACTION
        assert len(found.back_ms) >= 2
        assert sorted(found.back_ms)[len(found.back_ms) // 2] < MAX_P99_MS * crowd()
        assert daemon.info().engine_starts == 1
