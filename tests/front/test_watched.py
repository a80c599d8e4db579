"""Files that are read again when they change, and who writes them while they are read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.front.watched import UnusableFile, Watched


def finished_behind(file: Path, load: Callable[[], str]) -> Callable[[], str]:
    """Loads, and where that fails, its writer finishes before anybody looks at the file again."""

    def loading() -> str:
        try:
            return load()
        except UnusableFile:
            file.write_text("whole and new")
            raise

    return loading


def test_a_version_that_is_finished_while_its_beginning_is_refused_is_read_as_well(tmp_path: Path) -> None:
    file = tmp_path / "principals"
    file.write_text("whole")

    def load() -> str:
        text = file.read_text()
        if not text.startswith("whole"):
            raise UnusableFile("half of it")
        return text

    watched = Watched((file,), finished_behind(file, load))
    file.write_text("who")
    assert not watched.poll()
    assert watched.value == "whole"
    assert watched.poll()
    assert watched.value == "whole and new"
    assert not watched.poll()


def test_a_file_that_changes_while_it_is_read_is_read_once_it_does_not(tmp_path: Path) -> None:
    file = tmp_path / "principals"
    file.write_text("")
    changes = 0

    def load() -> str:
        nonlocal changes
        text = file.read_text()
        if changes:
            changes -= 1
            file.write_text(text + "x")
        return text

    watched = Watched((file,), load)
    file.write_text("new")
    changes = 3
    assert not watched.poll()
    assert watched.poll()
    assert watched.value == "newxxx"


def test_a_version_that_cannot_be_used_is_complained_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "principals"
    file.write_text("whole")

    def load() -> str:
        if file.read_text() != "whole":
            raise UnusableFile("no")
        return "whole"

    watched = Watched((file,), load)
    file.write_text("other")
    for _ in range(3):
        assert not watched.poll()
    assert len(caplog.records) == 1
