"""Absorbed MLA over paged latents against the expanded mathematics in float64."""

import pytest
import torch

from kernels.key_tiles import Span, gather_rows, scatter_rows
from kernels.mla import absorb_query, expand_values, mla_attention, mla_reference
from tests.kernels.paging import paged

HEADS, NOPE, ROPE, LATENT, VALUE = 3, 5, 4, 7, 6
TILE = 64
SCALE = (NOPE + ROPE) ** -0.5


def make(num_keys: int, *, rope: int = ROPE, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    queries = draw(num_keys, HEADS, NOPE), draw(num_keys, HEADS, rope)
    return *queries, draw(num_keys, LATENT + rope), draw(HEADS, NOPE, LATENT), draw(HEADS, VALUE, LATENT)


def reference(nope, rope, rows, w_uk, w_uv) -> torch.Tensor:
    return mla_reference(nope.double(), rope.double(), rows.double(), w_uk.double(), w_uv.double(), SCALE)


def attend(nope, rope, plane, table, w_uk, w_uv, start: int) -> torch.Tensor:
    queries = absorb_query(nope, rope, w_uk)
    out = mla_attention(queries, plane, Span(start, table, TILE), latent_dim=LATENT, scale=SCALE)
    return expand_values(out, w_uv)


@pytest.mark.parametrize("num_keys", [1, 2, 15, 63, 64, 65, 2 * TILE, 127, 128, 129, 301])
def test_a_whole_prompt_equals_the_expanded_form(num_keys: int) -> None:
    nope, rope, rows, w_uk, w_uv = make(num_keys)
    plane, table = paged(rows, 16)
    want = reference(nope, rope, rows, w_uk, w_uv)
    got = attend(nope, rope, plane, table, w_uk, w_uv, 0)
    assert torch.allclose(got.double(), want, atol=2e-5)


@pytest.mark.parametrize("start", [0, 1, 37, 255, 256, 300])
def test_later_rows_read_the_paged_history(start: int) -> None:
    nope, rope, rows, w_uk, w_uv = make(301)
    plane, table = paged(rows, 8)
    want = reference(nope[start:], rope[start:], rows, w_uk, w_uv)
    got = attend(nope[start:], rope[start:], plane, table, w_uk, w_uv, start)
    assert torch.allclose(got.double(), want, atol=2e-5)


def test_a_model_without_rope_part_is_served() -> None:
    nope, rope, rows, w_uk, w_uv = make(40, rope=0)
    plane, table = paged(rows, 8)
    want = reference(nope, rope, rows, w_uk, w_uv)
    assert torch.allclose(attend(nope, rope, plane, table, w_uk, w_uv, 0).double(), want, atol=2e-5)


def test_where_the_blocks_lie_changes_no_byte() -> None:
    nope, rope, rows, w_uk, w_uv = make(400)
    results = []
    for seed in range(3):
        plane, table = paged(rows, 16, seed=seed, spare=seed)
        results.append(attend(nope[300:], rope[300:], plane, table, w_uk, w_uv, 300))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_bfloat16_rows_are_summed_in_float32() -> None:
    nope, rope, rows, w_uk, _ = (t.bfloat16() for t in make(300))
    plane, table = paged(rows, 16)
    queries = absorb_query(nope, rope, w_uk)
    span = Span(0, table, TILE)
    out = mla_attention(queries, plane, span, latent_dim=LATENT, scale=SCALE)
    exact = mla_attention(queries.float(), plane.float(), span, latent_dim=LATENT, scale=SCALE)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.bfloat16())


def test_rows_written_are_the_rows_read() -> None:
    rows = torch.arange(60.0).view(20, 3)
    plane, table = paged(torch.full((20, 3), torch.nan), 4)
    scatter_rows(plane, table, 3, rows[3:17])
    assert torch.equal(gather_rows(plane, table, 3, 17), rows[3:17])
    assert gather_rows(plane, table, 17, 20).isnan().all()
    assert gather_rows(plane, table, 5, 5).shape == (0, 3)


def test_a_table_that_does_not_cover_the_rows_is_refused() -> None:
    plane, table = paged(torch.zeros(8, 3), 4)
    with pytest.raises(AssertionError, match="block table"):
        gather_rows(plane, table, 0, 9)
    with pytest.raises(AssertionError, match="block table"):
        scatter_rows(plane, table, 7, torch.zeros(2, 3))
