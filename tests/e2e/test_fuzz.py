"""A fraction of the campaign `fuzz`, and the same rules: every request has an answer, and the daemon is as before."""

from pathlib import Path

from tests.campaigns.budget import first_seed
from tests.campaigns.fuzz import FLAGS, Fuzz, fuzz_drain
from tests.e2e.daemon import Daemon, tiny_model
from tests.fuzz.heavy import heavy_cases
from tests.fuzz.traffic import Tally

FRACTION = 1_500  # of 200,000
KINDS = ("any message", "a sound one, changed", "bytes", "metadata", "path", "compressed", "HTTP/2: sound")


def test_requests_that_nobody_would_send_are_answered_and_change_nothing(socket_folder: Path) -> None:
    daemon = Daemon(socket_folder, tiny_model(socket_folder / "model"), *FLAGS, "--disk-path", f"{socket_folder}/disk")
    try:
        fuzz = Fuzz(daemon, first_seed())
        fuzz.run(FRACTION, windows=1)
    finally:
        status = daemon.stop()
    print(f"fuzz: {fuzz.tally.sent} {fuzz.tally.answers}")
    assert status == 0
    assert fuzz.tally.sent.total() == FRACTION
    assert all(fuzz.tally.sent[kind] for kind in KINDS)
    assert fuzz.tally.answers["well"] > FRACTION // 20
    assert fuzz.tally.answers["INVALID_ARGUMENT"] > FRACTION // 4
    assert fuzz.num_sound == 10
    assert "Traceback" not in daemon.log.read_text()


def test_drain_answers_whatever_it_is_asked_with(socket_folder: Path) -> None:
    tally: Tally = fuzz_drain(socket_folder / "drain", first_seed(), 60)
    assert tally.answers["INVALID_ARGUMENT"] > 3


def test_every_limit_has_a_case_that_is_over_it() -> None:
    kinds = [case.kind for case in heavy_cases()]
    assert {kind: kinds.count(kind) >= 3 for kind in set(kinds)} == dict.fromkeys(
        ("large", "bomb", "deep prompt", "template", "structure"), True
    )
