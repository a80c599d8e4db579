"""Layouts place every part of an image once, and refuse what could not be read back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiers.layout import ALIGNMENT_BYTES, DTYPE_BYTES, Plane, SlotTensor, StateLayout
from tiers.pools import DevicePools

dtypes = st.sampled_from(sorted(DTYPE_BYTES))
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> StateLayout:
    planes = draw(st.lists(st.tuples(dtypes, shapes, st.sampled_from([1, 2, 4])), min_size=1, max_size=5))
    slots = draw(st.lists(st.tuples(dtypes, shapes.filter(bool)), max_size=4))
    return StateLayout(
        tuple(Plane(f"p{i}", dtype, shape, per) for i, (dtype, shape, per) in enumerate(planes)),
        tuple(SlotTensor(f"s{i}", dtype, shape) for i, (dtype, shape) in enumerate(slots)),
        block_size=draw(st.sampled_from([4, 8, 64])),
    )


@given(layouts())
def test_parts_are_aligned_disjoint_and_inside_their_image(layout: StateLayout) -> None:
    for parts, size in ((layout.block_parts, layout.block_bytes), (layout.slot_parts, layout.slot_bytes)):
        end = 0
        for part in parts:
            assert part.offset % ALIGNMENT_BYTES == 0
            assert part.offset >= end
            end = part.offset + part.num_bytes
        assert end <= size


@given(layouts())
def test_views_of_the_pools_write_their_own_bytes_and_no_others(layout: StateLayout) -> None:
    pools = DevicePools(layout, 3, 2, torch.device("cpu"))
    for views, images, parts in (
        (pools.planes, pools.blocks, layout.block_parts),
        (pools.slot_tensors, pools.slots, layout.slot_parts),
    ):
        for part in parts:
            images.zero_()
            views[part.name][1].view(torch.uint8).fill_(255)
            expected = torch.zeros_like(images)
            expected[1, part.offset : part.offset + part.num_bytes] = 255
            assert torch.equal(images, expected)
            assert views[part.name].shape == (images.shape[0], *part.shape)


@given(layouts(), layouts())
def test_digests_agree_exactly_where_layouts_do(one: StateLayout, other: StateLayout) -> None:
    assert (one.digest() == other.digest()) == (one == other)


def test_bytes_per_token_is_the_payload() -> None:
    layout = StateLayout((Plane("k", "bfloat16", (3, 64)), Plane("pool", "float32", (8,), tokens_per_row=4)), (), 64)
    assert layout.bytes_per_token == 3 * 64 * 2 + 8
    assert layout.slot_bytes == 0


@pytest.mark.parametrize(
    ("planes", "slots", "block_size", "message"),
    [
        ((Plane("a", "float32", (1,)), Plane("a", "float32", (1,))), (), 64, "share a name"),
        ((Plane("a", "float32", (1,)),), (SlotTensor("a", "float32", (1,)),), 64, "share a name"),
        ((Plane("a", "float3", (1,)),), (), 64, "unknown dtype"),
        ((Plane("a", "float32", (0,)),), (), 64, "not positive"),
        ((Plane("a", "float32", (1,), tokens_per_row=3),), (), 64, "do not divide"),
        ((Plane("a", "float32", (1,)),), (), 0, "block_size"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(planes, slots, block_size, message) -> None:
    with pytest.raises(ValueError, match=message):
        StateLayout(planes, slots, block_size)


@pytest.mark.parametrize("grid", [0, 32, 65, 96])
def test_a_grid_that_is_no_multiple_of_the_block_is_refused(grid: int) -> None:
    with pytest.raises(ValueError, match="grid"):
        StateLayout((Plane("a", "float32", (1,)),), (), 64).check_grid(grid)
