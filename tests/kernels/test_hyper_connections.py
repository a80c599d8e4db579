"""Hyper-connections against the formulas written out in float64, and Sinkhorn's promise."""

import torch

from kernels.hyper_connections import (
    HyperRule,
    HyperWeights,
    collapse_streams,
    expand_streams,
    inject,
    mix_streams,
    sinkhorn,
)

RULE = HyperRule(norm_eps=1e-5, eps=1e-6, iterations=20)
STREAMS, WIDTH = 4, 6


def make(num_rows: int):
    generator = torch.Generator().manual_seed(0)
    mixes = (2 + STREAMS) * STREAMS
    weights = HyperWeights(
        fn=torch.randn(mixes, STREAMS * WIDTH, generator=generator) * 0.3,
        base=torch.randn(mixes, generator=generator),
        scale=torch.randn(3, generator=generator),
    )
    return torch.randn(num_rows, STREAMS, WIDTH, generator=generator), weights


def test_mixing_equals_the_formulas_in_float64() -> None:
    streams, weights = make(5)
    mix = mix_streams(streams, weights, RULE)
    fn, base, scale = weights.fn.double(), weights.base.double(), weights.scale.double()
    for row in range(5):
        flat = streams[row].double().flatten()
        values = fn @ (flat / (flat.square().mean() + RULE.norm_eps).sqrt())
        pre = torch.sigmoid(values[:4] * scale[0] + base[:4]) + RULE.eps
        post = 2 * torch.sigmoid(values[4:8] * scale[1] + base[4:8])
        comb = (values[8:] * scale[2] + base[8:]).view(4, 4).softmax(dim=1) + RULE.eps
        for step in range(39):
            comb = comb / (comb.sum(dim=step % 2, keepdim=True) + RULE.eps)
        assert torch.allclose(mix.collapsed[row].double(), pre @ streams[row].double(), atol=1e-5)
        assert torch.allclose(mix.post[row].double(), post, atol=1e-5)
        assert torch.allclose(mix.comb[row].double(), comb, atol=1e-5)


def test_sinkhorn_makes_rows_and_columns_sum_to_one() -> None:
    logits = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0))
    comb = sinkhorn(logits, RULE)
    assert (comb.sum(dim=1) - 1).abs().max() < 1e-4
    assert (comb.sum(dim=2) - 1).abs().max() < 1e-2


def test_injection_adds_the_output_and_mixes_old_streams() -> None:
    streams, weights = make(3)
    mix = mix_streams(streams, weights, RULE)
    output = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    new = inject(output, streams, mix)
    for row in range(3):
        for j in range(STREAMS):
            want = mix.post[row, j] * output[row] + sum(mix.comb[row, i, j] * streams[row, i] for i in range(STREAMS))
            assert torch.allclose(new[row, j], want, atol=1e-5)


def test_streams_begin_as_copies_that_do_not_alias_and_end_as_their_mean() -> None:
    rows = torch.randn(2, WIDTH)
    streams = expand_streams(rows, STREAMS)
    assert torch.allclose(collapse_streams(streams), rows)
    streams[0, 1] = 0
    assert torch.equal(streams[0, 0], rows[0])


def test_a_row_does_not_depend_on_the_others() -> None:
    streams, weights = make(9)
    whole = mix_streams(streams, weights, RULE)
    alone = mix_streams(streams[4:5], weights, RULE)
    assert torch.allclose(alone.collapsed[0], whole.collapsed[4], atol=1e-5)
    assert torch.allclose(alone.comb[0], whole.comb[4], atol=1e-5)


def test_bfloat16_streams_are_weighed_in_float32() -> None:
    streams, weights = make(4)
    mix = mix_streams(streams.bfloat16(), weights, RULE)
    assert mix.collapsed.dtype == torch.bfloat16
    assert mix.post.dtype == mix.comb.dtype == torch.float32
    assert inject(mix.collapsed, streams.bfloat16(), mix).dtype == torch.bfloat16
