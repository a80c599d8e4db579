"""A weight in the matrix units' own order gives what the plain one gives."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from daemon.layers.linear import Embedding, Linear, can_pack
from daemon.layers.parameters import Parameters


def filled(make):
    parameters = Parameters(torch.device("cpu"), torch.bfloat16)
    layer = make(parameters.root)
    generator = torch.Generator().manual_seed(0)
    plain = {}
    for name, target in parameters.targets.items():
        plain[name] = torch.randn(target.shape, generator=generator).bfloat16()
        target.view.copy_(plain[name])
    parameters.finish()
    return layer, plain


@pytest.mark.parametrize("makes_logits", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 16, 200])
def test_packed_products_equal_plain_ones(num_rows, makes_logits):
    if not can_pack(torch.empty(1, dtype=torch.bfloat16)):
        pytest.skip("this CPU has no bfloat16 matrix units")
    layer, plain = filled(lambda root: Linear(root, (("a", 96), ("b", 32)), 64, bias=True, makes_logits=makes_logits))
    assert layer._is_packed
    x = torch.randn(num_rows, 64).bfloat16()
    weight = torch.cat((plain["a.weight"], plain["b.weight"])).float()
    expected = functional.linear(x.float(), weight, torch.cat((plain["a.bias"], plain["b.bias"])).float())
    close = partial(torch.testing.assert_close, atol=0.05, rtol=0.01)
    close(layer(x).float(), expected)


def test_a_tied_matrix_is_counted_in_each_order_it_is_held_in():
    parameters = Parameters(torch.device("cpu"), torch.bfloat16)
    embedding = Embedding(parameters.root, "embed", 128, 64, makes_logits=True)
    copies = 2 if can_pack(embedding.weight) else 1
    assert parameters.num_bytes == copies * 128 * 64 * 2
    assert parameters.num_parameters == 128 * 64
    embedding.weight.copy_(torch.randn(128, 64))
    parameters.finish()
    x = torch.randn(3, 64).bfloat16()
    expected = x.float() @ embedding.weight.float().T
    torch.testing.assert_close(embedding.logits(x).float(), expected, atol=0.05, rtol=0.01)
    assert torch.equal(embedding(torch.tensor([7])), embedding.weight[7:8])
