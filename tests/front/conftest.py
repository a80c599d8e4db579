"""One front for the tests that leave it as they found it."""

from collections.abc import Generator

import pytest

from tests.front.harness import Front, running_front


@pytest.fixture(autouse=True)
def no_front_outlives_its_test() -> Generator[None]:
    """A test that failed half-way leaves no process."""
    num_before = len(Front.started)
    yield
    for front in Front.started[num_before:]:
        if front.process.poll() is None:
            front.process.kill()
            front.process.wait()
    del Front.started[num_before:]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    """A ready front whose engine makes a token each millisecond; at most 4 requests run, the others queue."""
    with running_front(tmp_path_factory.mktemp("front"), engine=("--max-running", "4", "--context", "100000")) as front:
        yield front
