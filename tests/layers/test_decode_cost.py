"""What a decode step costs beside its matrices: operations that are dispatched, which a small model feels."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from daemon.batch import SequenceRows, make_batch
from daemon.models.base import BuildOptions, Model, finish
from daemon.models.load import build_dummy
from tests.e2e.daemon import TINY
from tiers.pools import DevicePools

MOST_OF_A_LAYER = 49  # of llama in float32: rows of unequal length take two more than one row alone
MOST_BESIDE = 54  # batch, plan, embedding, rotary positions, last norm and head
SHARED = 32_768  # torch gives what has more elements than this to all threads
BLOCK_SIZE = 16
CPU = torch.device("cpu")


class Dispatched(TorchDispatchMode):
    """Counts the operations inside its with block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.copied: list[int] = []  # elements that each gather of blocks moves

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index_select.default:
            self.copied.append(made.numel())
        return made


def model_of(num_layers: int) -> Model:
    return build_dummy({**TINY, "num_hidden_layers": num_layers}, BuildOptions(torch.float32, CPU, tile=4 * BLOCK_SIZE))


def operations(model: Model, num_rows: int) -> int:
    pools = DevicePools(model.layout(BLOCK_SIZE), 64, 1, CPU)
    rows = [SequenceRows([7], 20 + i, [3 * i, 3 * i + 1, 3 * i + 2], 0, 0) for i in range(num_rows)]
    with torch.inference_mode(), Dispatched() as dispatched:
        finish(model.forward(make_batch(rows, BLOCK_SIZE, CPU), pools))
    return dispatched.count


@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_decode_step_takes_few_operations_however_many_rows(num_rows: int) -> None:
    small, large = (operations(model_of(layers), num_rows) for layers in (1, 3))
    of_a_layer = (large - small) // 2
    assert 20 < of_a_layer <= MOST_OF_A_LAYER
    assert small - of_a_layer <= MOST_BESIDE


def test_a_short_history_is_copied_without_waking_other_threads() -> None:
    options = BuildOptions(torch.bfloat16, CPU, tile=64 * BLOCK_SIZE)
    model = build_dummy({**TINY, "num_key_value_heads": 2, "head_dim": 64}, options)
    pools = DevicePools(model.layout(BLOCK_SIZE), 64, 1, CPU)
    row = SequenceRows([7], 511, list(range(32)), 0, 0)
    with torch.inference_mode(), Dispatched() as dispatched:
        finish(model.forward(make_batch([row], BLOCK_SIZE, CPU), pools))
    # Keys of a layer are 512 x 2 x 64 = 65,536 numbers.
    assert len(dispatched.copied) >= 2
    assert max(dispatched.copied) == 65_536 // 4 < SHARED
