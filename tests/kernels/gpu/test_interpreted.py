"""The checks of all kernels (check_*.py) in Triton's interpreter."""

import pytest

from tests.kernels.gpu.inner import files, run_inner

NUM_PROCESSES = 4  # each takes seconds to import torch and Triton


@pytest.mark.parametrize("first", range(NUM_PROCESSES))
def test_interpreted_kernels_compute_what_they_say(first: int) -> None:
    run_inner(files("check_*.py")[first::NUM_PROCESSES], "interpreter", {"TRITON_INTERPRET": "1"})


def test_there_are_checks() -> None:
    assert files("check_*.py")
