"""The shipped tables of launch choices: each entry belongs to a case, keeps the rules, and compiles without spills."""

from dataclasses import asdict

import pytest

from kernels.launch_table import TABLES, buckets, read_table
from ops.bench.tune import all_cases
from tests.kernels.gpu.compiler import machine_code
from tests.kernels.gpu.fractions import some

CASES = all_cases()
TABLE = read_table(TABLES / "sm_90.json")
# What a choice may follow: constants of a model, and on which side of a link memory is. No length, no number of rows.
WIDTHS = {"width", "inner", "channels", "head_dim", "state_dim"}
COUNTS = {"streams", "heads", "kv_heads", "num_experts"}
CONSTANTS = WIDTHS | COUNTS | {"over_link"}


def test_a_choice_follows_constants_of_a_model():
    for case in CASES:
        assert set(case.tunable.shape) <= CONSTANTS, case.name
        assert tuple(case.shape) == case.tunable.shape
        assert case.tunable.neutral or len(case.buckets) == 1, f"{case.name}: its choice reaches bytes"


def test_a_case_is_tuned_once():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_the_table_of_sm_90_is_of_these_cases():
    assert TABLE is not None
    found = [
        (case.tunable.kernel, case.shape, one.most_rows, asdict(one.choice))
        for case in CASES
        for one in buckets(case.tunable, TABLE, tuple(case.shape.values()))
    ]
    entries = [(entry.kernel, entry.shape, entry.most_rows, entry.choice) for entry in TABLE.entries]
    assert entries
    assert not [entry for entry in entries if entry not in found]


def chosen():
    for case in CASES:
        for number, bucket in enumerate(buckets(case.tunable, TABLE, tuple(case.shape.values()))):
            yield pytest.param(case, bucket.choice, id=f"{case.name} {number}")


@pytest.mark.parametrize(("case", "choice"), some(list(chosen()), 4))
def test_what_the_table_chose_compiles_without_spills(case, choice):
    inputs = case.make(case.few_rows, 0)
    with machine_code():
        case.run(inputs, choice)
