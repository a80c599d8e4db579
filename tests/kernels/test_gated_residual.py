"""Gated residual streams against the formulas written out in float64."""

import torch

from kernels.gated_residual import GatedResidualWeights, grouped_rms_norm, inject_residual, mix_residual

STREAMS, WIDTH, RANK, EPS = 4, 6, 3, 1e-6


def make(num_rows: int, *, inject: bool = True):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    full = STREAMS * WIDTH
    last = draw(STREAMS, full) if inject else None
    return draw(num_rows, full), GatedResidualWeights(draw(full), draw(RANK, full), draw(full, RANK), last)


def test_mixing_equals_the_formulas_in_float64() -> None:
    streams, weights = make(5)
    mix = mix_residual(streams, weights, num_streams=STREAMS, eps=EPS)
    assert weights.inject is not None
    assert mix.injection is not None
    for row in range(5):
        parts = streams[row].double().view(STREAMS, WIDTH)
        scaled = parts / (parts.square().mean(dim=1, keepdim=True) + EPS).sqrt()
        normed = scaled.flatten() * (1 + weights.norm.double())
        low = weights.down.double() @ normed / STREAMS
        gate = torch.sigmoid(weights.up.double() @ (low * torch.sigmoid(low)))
        mixed = (gate * normed).view(STREAMS, WIDTH).mean(dim=0)
        injection = 2 * torch.sigmoid(weights.inject.double() @ normed / STREAMS)
        assert torch.allclose(mix.mixed[row].double(), mixed, atol=1e-6)
        assert torch.allclose(mix.injection[row].double(), injection, atol=1e-6)


def test_each_stream_gets_the_output_by_its_own_weight() -> None:
    streams, _ = make(3)
    output, injection = torch.randn(3, WIDTH), torch.randn(3, STREAMS)
    new = inject_residual(output, streams, injection).view(3, STREAMS, WIDTH)
    for j in range(STREAMS):
        want = streams.view(3, STREAMS, WIDTH)[:, j] + injection[:, j, None] * output
        assert torch.allclose(new[:, j], want)


def test_the_end_of_the_stack_injects_nothing() -> None:
    streams, weights = make(2, inject=False)
    assert mix_residual(streams, weights, num_streams=STREAMS, eps=EPS).injection is None


def test_groups_are_normed_apart() -> None:
    rows = torch.cat((torch.full((1, WIDTH), 100.0), torch.full((1, WIDTH), 0.5)), dim=1)
    out = grouped_rms_norm(rows, torch.zeros(2 * WIDTH), 2, EPS)
    assert torch.allclose(out, torch.ones_like(out), atol=1e-5)
