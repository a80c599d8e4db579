"""Which states of a prompt are kept."""

import pytest

from tiers.admission import checkpoint_positions


@pytest.mark.parametrize(
    ("prompt_len", "resume_len", "branch_len", "asked", "kept"),
    [
        (8500, 0, None, (), (8192,)),  # a prompt that nothing is known of: its last grid position
        (8500, 0, 5000, (), (4096, 8192)),  # leaves a known path inside the second chunk
        (8500, 4096, 4096, (), (8192,)),  # the state at the branch point is where it resumed
        (8192, 0, None, (), (8192,)),  # the end is on the grid
        (8192, 4096, 8192, (), (8192,)),
        (4095, 0, None, (), ()),  # too short to have a grid position
        (12_300, 8192, None, (), (12_288,)),
        (12_300, 12_288, None, (), ()),
        (20_000, 0, None, (4096, 5000, 40_960), (4096, 16_384)),  # asked for: on the grid and inside only
    ],
)
def test_states_are_kept_at_branches_at_the_end_and_where_asked(
    prompt_len: int, resume_len: int, branch_len: int | None, asked: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    found = checkpoint_positions(prompt_len, grid=4096, resume_len=resume_len, branch_len=branch_len, asked=asked)
    assert found == kept
