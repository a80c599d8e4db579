"""The compile gate (gate_*.py): all kernels where they are called, for sm_90."""

import pytest

from tests.kernels.gpu.inner import files, run_inner


@pytest.mark.parametrize("name", files("gate_*.py"))
def test_kernels_compile_for_sm_90_without_spills(name: str) -> None:
    run_inner([name], "compiler", {})


def test_there_is_a_gate() -> None:
    assert files("gate_*.py")
