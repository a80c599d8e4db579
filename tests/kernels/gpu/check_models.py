"""Whole families in Triton's forms, chunks and decode steps, beside torch's forms in float32 on the CPU.

A bfloat16 model is off from float32 by its rounding, whatever computes it. So the bound is torch's own distance in
bfloat16: Triton's form may be twice as far, and no further. Where scores nearly tie, a rounding picks another expert or
another key, and that row is far off in either form; so rows are counted, and not averaged.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from daemon.batch import SequenceRows, make_batch
from daemon.layers.parameters import Parameters
from daemon.models.base import BuildOptions, Model, finish
from daemon.models.fields import Fields
from daemon.models.load import build_model
from daemon.weights.dummy import fill_with_dummies
from kernels.dispatch import TORCH, Kernels
from kernels.triton_forms import TRITON
from tests.kernels.gpu.paged import DEVICE, INTERPRETED, relative_error
from tiers.pools import DevicePools

CPU, BLOCK, TILE = torch.device("cpu"), 16, 64
CONFIGS = Path(__file__).parents[2] / "exact" / "configs"
# Cut to what has every kind of layer once, with heads whose widths are powers of two from 16 on, as kernels want them.
CUTS: dict[str, dict[str, object]] = {
    "qwen3_5_moe": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "linear_value_head_dim": 32,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "mamba_head_dim": 16,
    },
}
ON_A_CARD = ("glm5_next", "qwen3", "qwen3_moe", "kimi_linear", "glm_moe_dsa", "deepseek_v32")
PROMPTS = (21, 18) if INTERPRETED else (37, 22)
STEPS = 1 if INTERPRETED else 3


def kernels() -> Kernels:
    """Triton's; but products of few rows, a program for every column or two, keep an interpreter busy for minutes."""
    if not INTERPRETED:
        return TRITON
    return replace(TRITON, rows=replace(TRITON.rows, linear=functional.linear, few_experts=None))


@dataclass(frozen=True, slots=True)
class Form:
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels


def config(name: str) -> dict[str, object]:
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    part = values.get("text_config", values)
    part.update(CUTS.get(name, {}))
    return values


def build(values: dict[str, object], form: Form, weights: dict[str, torch.Tensor]) -> Model:
    """The model with these weights; where there are none yet, with new ones, which are put there."""
    parameters = Parameters(form.device, form.dtype, form.kernels)
    model = build_model(Fields(values), BuildOptions(form.dtype, form.device, TILE), parameters)
    if not weights:
        fill_with_dummies(parameters, 5, lambda _done, _total: None)
        weights.update({name: target.view.clone() for name, target in parameters.targets.items()})
    for name, target in parameters.targets.items():
        target.view.copy_(weights[name])
    parameters.finish()
    return model


@torch.inference_mode()
def logits(model: Model) -> torch.Tensor:
    """Two prompts, the second resumed in its middle, then steps of both with a row of padding: [rows, vocab]."""
    device = model.facts.device
    pools = DevicePools(model.layout(BLOCK), 12, 6, device)
    pools.blocks.fill_(0xFF)  # NaN: what is not written must not be read
    pools.clear_slot(2)
    pools.clear_slot(3)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, model.facts.vocab_size, (2, 64), generator=generator).tolist()
    tables = [[1, 5, 2, 9], [7, 3, 8, 4]]
    made: list[torch.Tensor] = []

    def forward(*rows: SequenceRows) -> None:
        out = finish(model.forward(make_batch(list(rows), BLOCK, device), pools)).cpu()
        assert out.isfinite().all(dim=-1)[:2].all()
        made.append(out[:2])

    forward(SequenceRows(ids[0][: PROMPTS[0]], 0, tables[0], 2, 2))
    forward(SequenceRows(ids[1][:16], 0, tables[1], 3, 4))
    forward(SequenceRows(ids[1][16 : PROMPTS[1]], 16, tables[1], 4, 3))
    for t in range(STEPS):
        rows = [
            SequenceRows([ids[s][start + t]], start + t, tables[s], 2 + s, 2 + s) for s, start in enumerate(PROMPTS)
        ]
        forward(*rows, SequenceRows([0], 0, [0], 0, 0))
    return torch.cat(made)


@pytest.mark.parametrize("name", [*CUTS, *(() if INTERPRETED else ON_A_CARD)])
def test_a_family_computes_as_near_to_float32_as_torch_does(name: str):
    values, weights = config(name), {}
    rounded = logits(build(values, Form(torch.bfloat16, CPU, TORCH), weights))
    exact = logits(build(values, Form(torch.float32, CPU, TORCH), weights))
    model = build(values, Form(torch.bfloat16, DEVICE, kernels()), weights)
    assert model.caps.graph_capture
    made = logits(model)
    bound = 2 * max(row_errors(rounded, exact))
    near = [error < bound for error in row_errors(made, exact)]
    assert sum(near) >= len(near) - 2, row_errors(made, exact)


def row_errors(made: torch.Tensor, exact: torch.Tensor) -> list[float]:
    return [relative_error(*pair) for pair in zip(made, exact, strict=True)]
