"""The pages' terminals, typed: README and the pages on the wire, on clients and on warming, with a real daemon.

One daemon serves them all: the one that README starts. README's other commands come last, since its last one drains.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.foreign.golang import go_program
from tests.foreign.kept import NotToBeHad, npm_packages
from tests.pages.blocks import ROOT, Typed, typed_in
from tests.pages.session import Session, make_clone

README = ROOT / "README.md"
DOCS = ROOT / "ops" / "docs"
BEGINNING = 4  # of README: a terminal that serves, and the variable that names the daemon


@pytest.fixture(scope="module")
def missing() -> list[str]:
    """Beginnings of commands whose program cannot be had here; filled with the clone."""
    return []


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, missing: list[str]) -> Iterator[Session]:
    clone = make_clone(tmp_path_factory.mktemp("w"))
    try:
        (clone / "ops" / "examples" / "node" / "node_modules").symlink_to(npm_packages() / "node_modules")
    except NotToBeHad:
        missing.append("node ")
    try:
        (clone / "ops" / "examples" / "go" / "generate").symlink_to(go_program())
    except NotToBeHad:
        missing.append("ops/examples/go/")
    session = Session(clone)
    for typed in typed_in(README)[:BEGINNING]:
        session.type(typed)
    yield session
    session.close()


def read(page: Path, session: Session, missing: list[str]) -> list[Typed]:
    """Types the commands of a page. Returns: those that ran."""
    commands = typed_in(page)[BEGINNING if page == README else 0 :]
    run = [typed for typed in commands if not typed.command.startswith(tuple(missing))]
    for typed in run:
        session.type(typed)
    return run


@pytest.mark.parametrize("page", ["wire.md", "clients.md", "warming.md"])
def test_each_command_of_a_page_prints_what_the_page_shows(page: str, session: Session, missing: list[str]) -> None:
    assert read(DOCS / page, session, missing)


def test_readme_is_what_a_newcomer_sees(session: Session, missing: list[str]) -> None:
    run = read(README, session, missing)
    assert run[-1].command == "downcore drain --yes", "nothing can come after it"
    assert len(run) >= 8
