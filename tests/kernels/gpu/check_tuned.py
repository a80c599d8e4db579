"""What is tuned: every way to launch a kernel computes what torch's form does, and neutral ones the same bytes."""

from random import Random

import pytest
import torch

from kernels.launch_table import buckets, shipped_table
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
NUM_ROWS = 9 if INTERPRETED else 77


def launches():
    """A candidate of every small case; on a card what its table chose, too."""
    for case in SMALL:
        for rows in case.buckets:
            yield case, Random(NUM_ROWS).choice(rows.candidates)
    for case in [] if INTERPRETED else all_cases():
        for bucket in buckets(case.tunable, shipped_table("sm_90"), tuple(case.shape.values())):
            yield case, bucket.choice


@pytest.mark.parametrize(("case", "choice"), list(launches()), ids=lambda value: getattr(value, "name", None))
def test_a_choice_computes_what_the_default_does(case, choice):
    num_rows = NUM_ROWS if INTERPRETED else NUM_ROWS + case.few_rows
    wanted = case.reference(case.make(num_rows, 3))
    default = case.run(case.make(num_rows, 3), case.default(num_rows))
    made = case.run(case.make(num_rows, 3), choice)
    for ours, theirs, first in zip(made, wanted, default, strict=True):
        assert relative_error(ours.flatten(), theirs.flatten()) < 1e-2
        # An interpreter's products of matrices sum in an order of their own.
        assert INTERPRETED or not case.tunable.neutral or torch.equal(ours, first), "other bytes"
