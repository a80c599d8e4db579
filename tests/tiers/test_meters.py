"""Histograms and counters of a tier: what falls where, and that nothing is lost."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from tiers.meters import EvictionReason, Histogram, Kind, TierMeters

BOUNDS = (0.5, 1.0, 4.0)


@given(st.lists(st.floats(0, 10)))
def test_each_value_is_below_the_first_bound_that_is_not_smaller(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    upto = list(accumulate(histogram.counts))
    assert upto == [sum(value <= bound for value in values) for bound in BOUNDS] + [len(values)]
    assert histogram.num_values == len(values)
    assert abs(histogram.total - sum(values)) <= 1e-9 * max(1.0, sum(values))


def test_a_block_that_was_there_before_the_start_has_no_age() -> None:
    meters = TierMeters()
    meters.block_left(EvictionReason.ROOM, since_s=0.0, now_s=1e9)
    assert meters.lifetime_s.num_values == 0
    meters.block_left(EvictionReason.ROOM, since_s=1e9 - 10, now_s=1e9)
    meters.checkpoint_left(EvictionReason.QUOTA)
    assert meters.lifetime_s.total == 10
    assert meters.evictions == {
        (Kind.BLOCK, EvictionReason.ROOM): 2, (Kind.CHECKPOINT, EvictionReason.QUOTA): 1
    }  # fmt: skip
