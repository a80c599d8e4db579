"""The checks of all kernels (check_*.py) in Triton's interpreter."""

import pytest

from tests.kernels.gpu.inner import files, run_inner


@pytest.mark.parametrize("name", files("check_*.py"))
def test_interpreted_kernels_compute_what_they_say(name: str) -> None:
    run_inner(name, "interpreter", {"TRITON_INTERPRET": "1"})


def test_there_are_checks() -> None:
    assert files("check_*.py")
