"""What is tuned: every way to launch a kernel computes what torch's form does, and neutral ones the same bytes."""

import pytest
import torch

from ops.bench.kernels_timing import relative_error
from ops.bench.tune import all_cases
from ops.bench.tune_rows import (
    conv_chunk_case,
    conv_step_case,
    gated_norm_case,
    hyper_cases,
    move_case,
    norm_case,
    turn_case,
)
from ops.bench.tune_wide import experts_case, mamba2_chunk_case, mamba2_step_case
from tests.kernels.gpu.fractions import some
from tests.kernels.gpu.paged import INTERPRETED

SMALL = [
    norm_case(48),
    gated_norm_case(2, 32, gate_first=False),
    gated_norm_case(2, 32, gate_first=True),
    turn_case(4, 2, 64, 32),
    conv_chunk_case(48),
    conv_step_case(48),
    *hyper_cases(2, 64),
    move_case(over_link=False, image_bytes=256),
    mamba2_chunk_case(4, 2, 32, 16),
    mamba2_step_case(4, 2, 32, 16),
    experts_case(4, 64, 32, 2),
]
ROWS = 9 if INTERPRETED else 77
CANDIDATES = 1 if INTERPRETED else 1000  # of a case


def launches():
    for case in SMALL if INTERPRETED else [*SMALL, *all_cases()]:
        for rows in case.buckets:
            for candidate in some(list(rows.candidates), CANDIDATES):
                yield pytest.param(case, candidate, id=f"{case.name} {candidate}")


@pytest.mark.parametrize(("case", "candidate"), list(launches()))
def test_a_candidate_computes_what_the_default_does(case, candidate):
    num_rows = max(ROWS, case.few_rows + 13) if not INTERPRETED else ROWS
    wanted = case.reference(case.make(num_rows, 3))
    default = case.run(case.make(num_rows, 3), case.default(num_rows))
    for choice in (None, candidate):
        made = default if choice is None else case.run(case.make(num_rows, 3), choice)
        for ours, theirs, first in zip(made, wanted, default, strict=True):
            assert relative_error(ours.flatten(), theirs.flatten()) < 1e-2
            # An interpreter's products of matrices sum in an order of their own.
            assert INTERPRETED or not case.tunable.neutral or torch.equal(ours, first), "other bytes"
